"""A network of another library as a body and a head: its classifier, the last linear layer, is taken out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError, require
from fedbench.core.weights import read_weights

ATTENTION = ("attn", "attention", "self_attention")  # names in timm, transformers and torchvision


class Backbone(nn.Module):
    """[B, channels, H, W] -> [B, C].  body: the network without its classifier [B, F]; head: a linear layer F -> C.

    make: builds the network.  key: how it is named in sentences ("model.name=resnet18").  channels: that the network
    reads; a grey image is shown in all of them.  read: the features among what the network returns.  Stochastic depth
    is switched off.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        key: str,
        input_shape: tuple,
        num_classes: int,
        channels: int,
        read: Callable[[Any], Tensor] = lambda out: out,
        load: Callable[[nn.Module], None] = lambda network: None,
    ):
        super().__init__()
        require(
            len(input_shape) == 3 and input_shape[0] in (1, channels),
            f"{key} reads images of 1 or {channels} channels, but the data set gives {tuple(input_shape)}",
        )
        try:
            body = make()
        except Exception as error:  # libraries raise errors of any kind for options and sizes that do not fit
            if is_raised_here(error):
                raise
            raise ConfigError(f"{key} cannot be built for images {tuple(input_shape)}: {_first(error)}") from error
        load(body)
        self.channels, self.read = channels, read
        features = _take_out_classifier(body, key)
        for m in body.modules():
            if getattr(m, "inplace", False):
                m.inplace = False  # type: ignore[assignment]  # else a captured output is what came after it
            if type(m).__name__.endswith(("StochasticDepth", "DropPath")):  # likewise, and its draws would not be keyed
                for rate in {"p", "drop_prob"} & vars(m).keys():
                    setattr(m, rate, 0.0)
        self.body, self.head = body, nn.Linear(features, num_classes)
        self._check(key, input_shape, features)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.read(self.body(x.expand(-1, self.channels, -1, -1))))

    def sublayers(self) -> dict[str, list[str]]:
        """Return the names of attention layers, mlps and the blocks around them, where adapters are added."""
        names = [name.rpartition(".") for name, _ in self.named_modules()]
        return {
            "attention": [".".join((at, last)) for at, _, last in names if last in ATTENTION],
            "mlp": [f"{at}.mlp" for at, _, last in names if last == "mlp"],
            "block": [at for at, _, last in names if last == "mlp"],
        }

    def _check(self, key: str, input_shape: tuple, features: int) -> None:
        """ConfigError unless two images of that size become features."""
        self.body.eval()
        try:
            with torch.no_grad():
                out = self.read(self.body(torch.zeros(2, self.channels, *input_shape[1:])))
        except Exception as error:  # of any kind: the code of a library
            if is_raised_here(error):
                raise
            raise ConfigError(f"{key} cannot compute images {tuple(input_shape)}: {_first(error)}") from error
        self.body.train()
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        require(
            shape == (2, features),
            f"{key} has no linear classifier as its last layer (without it, two images become {shape}): name a network "
            "that ends in one",
        )


def _take_out_classifier(network: nn.Module, key: str) -> int:
    """Put nothing in the place of the last linear layer; the numbers that it read."""
    name = classifier_of(network)
    require(
        name is not None, f"{key} has no linear layer that could be its classifier: name a network that ends in one"
    )
    classifier: Any = network.get_submodule(str(name))
    network.set_submodule(str(name), nn.Identity())
    return classifier.in_features


def classifier_of(network: nn.Module) -> str | None:
    """The name of the last linear layer."""
    return next((name for name, m in reversed(list(network.named_modules())) if isinstance(m, nn.Linear)), None)


def load_file(weights: str | None) -> Callable[[nn.Module], None]:
    """What puts the state dict of a file (.safetensors, or torch.save's) into a network, but for its classifier."""

    def load(network: nn.Module) -> None:
        if weights is None:
            return
        path = Path(weights)
        require(path.is_file(), f"model.weights={weights}: there is no such file")
        fit(network, read_state(path), f"model.weights={weights}")

    return load


def fit(network: nn.Module, stored: Mapping[str, Tensor], key: str) -> None:
    """Load all but the classifier, the last linear layer; ConfigError where the rest is not this network's."""
    last = classifier_of(network)
    body = {n: t for n, t in stored.items() if n.rpartition(".")[0] != last}
    own = network.state_dict()
    wrong = [n for n, t in body.items() if n not in own or own[n].shape != t.shape]
    wrong += [n for n in own if n not in body and n.rpartition(".")[0] != last]
    require(not wrong, f"{key} is not of this network: see {', '.join(wrong[:3])}")
    network.load_state_dict(body, strict=False)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the state dict of a file (.safetensors, or torch.save's).

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else read_weights(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.weights={path} cannot be read: {_first(error)}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def require_name(name: str, known: Iterable[str], library: str) -> None:
    """ConfigError with the nearest names where the library has no such network."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 4)
    hint = f"; did you mean {', '.join(near)}?" if near else f", which has {', '.join(sorted(known)[:6])}, ..."
    require(name in known, f"model.name={name} is no network of {library}{hint}")


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
