"""Networks of other libraries.  Their classifier, which is the last linear layer, is replaced by `head`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError, require
from fedbench.core.weights import read_weights

IMAGE_REMEDY = "Change model.options, the size of the images or the network"
ATTENTION_LAYERS = ("attn", "attention", "self_attention")  # names in timm, transformers and torchvision


class Backbone(nn.Module):
    """A network without its classifier (`body`), and a linear head on its features.  [B, channels, H, W] -> [B, C].

    Stochastic depth is disabled.

    Args:
        build: Returns the network.
        key: The option and value that select the network, for messages, such as "model.name=resnet18".
        input_shape: Channels, height and width of the data set's images.
        num_classes: C.
        channels: Input channels of the network.  Grey images are repeated in all of them.
        features_of: Returns the features [B, F] in the output of the network.
        load: Loads weights into the network.

    Attributes:
        body: The network without its classifier.
        head: The linear layer F -> C.

    Raises:
        ConfigError: The network cannot be built, or cannot process these images.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        key: str,
        input_shape: tuple,
        num_classes: int,
        channels: int,
        features_of: Callable[[Any], Tensor] = lambda output: output,
        load: Callable[[nn.Module], None] = lambda network: None,
    ):
        super().__init__()
        require(
            len(input_shape) == 3 and input_shape[0] in (1, channels),
            f"{key} needs images [channels, height, width] with 1 or {channels} channels, but the samples of the data "
            f"set have shape {tuple(input_shape)}: choose another data set, or another model",
        )
        with library_errors(key, f"be built for images {tuple(input_shape)}", IMAGE_REMEDY):
            body = build()
        load(body)
        self.channels = channels
        self.features_of = features_of
        num_features = _remove_classifier(body, key)
        for m in body.modules():
            if getattr(m, "inplace", False):
                m.inplace = False  # type: ignore[assignment]  # would change outputs that a method has captured
            # stochastic depth changes outputs in place, and its random numbers do not depend on the client
            if type(m).__name__.endswith(("StochasticDepth", "DropPath")):
                for rate in {"p", "drop_prob"} & vars(m).keys():
                    setattr(m, rate, 0.0)
        self.body = body
        self.head = nn.Linear(num_features, num_classes)
        self._check(key, input_shape, num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, channels, H, W]; the channel of a grey image [1, H, W] is repeated."""
        return self.head(self.features_of(self.body(x.expand(-1, self.channels, -1, -1))))

    def sublayers(self) -> dict[str, list[str]]:
        """Return the names of the layers to which an adapter can be added, by the kind of layer.

        Returns:
            Names of modules for the keys "attention", "mlp" and "block", the words that `adapter.places` accepts.
        """
        names = [name.rpartition(".") for name, _ in self.named_modules()]  # (parent, ".", last part)
        # ATTENTION_LAYERS: names of attention layers in the libraries, such as "attn"
        return {
            "attention": [".".join((parent, name)) for parent, _, name in names if name in ATTENTION_LAYERS],
            "mlp": [f"{parent}.mlp" for parent, _, name in names if name == "mlp"],
            "block": [parent for parent, _, name in names if name == "mlp"],  # a block has an mlp
        }

    def _check(self, key: str, input_shape: tuple, num_features: int) -> None:
        """Check that the body returns num_features features for each of two images of input_shape.

        Args:
            key: Option and value that name the network, for messages.
            input_shape: Channels, height and width of the data set's images.
            num_features: Inputs of the removed classifier.

        Raises:
            ConfigError: It does not, or the network cannot compute these images.
        """
        self.body.eval()
        # channels: those of the network, in which grey images are repeated; features_of: from its output to features
        with library_errors(key, f"compute images {tuple(input_shape)}", IMAGE_REMEDY), torch.no_grad():
            features = self.features_of(self.body(torch.zeros(2, self.channels, *input_shape[1:])))
        self.body.train()
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        require(
            shape == (2, num_features),
            f"{key} does not end in a linear classifier: without its last linear layer, two images give outputs of "
            f"shape {shape}, expected {(2, num_features)}. Choose a network that ends in a linear layer",
        )


@contextmanager
def library_errors(key: str, action: str, remedy: str) -> Iterator[None]:
    """Turn errors of a library into a ConfigError.

    Args:
        key: Option and value that name the network.
        action: What it should do, as in "be built for images (3, 32, 32)".
        remedy: What the user can do, as in "Change the network".
    """
    try:
        yield
    except Exception as error:  # libraries raise any type for options and sizes that do not fit
        if is_raised_here(error):  # an error of the code in the context, not of the library
            raise
        raise ConfigError(f"{key} cannot {action}: {first_line(error)}. {remedy}") from error


def _remove_classifier(network: nn.Module, key: str) -> int:
    """Replace the last linear layer of a network by the identity, and return the number of its inputs.

    Args:
        network: The network, which is changed.
        key: Option and value that name it, for the message.

    Raises:
        ConfigError: The network has no linear layer.
    """
    name = classifier_of(network)
    if name is None:
        raise ConfigError(
            f"{key} has no linear layer that could be its classifier: choose a network that ends in a linear layer"
        )
    classifier: Any = network.get_submodule(name)
    network.set_submodule(name, nn.Identity())
    return classifier.in_features


def classifier_of(network: nn.Module) -> str | None:
    """Return the dotted name of the last nn.Linear of a network, taken as its classifier; None if it has none."""
    return next((name for name, m in reversed(list(network.named_modules())) if isinstance(m, nn.Linear)), None)


def load_file(weights: str | None, with_head: bool = False) -> Callable[[nn.Module], None]:
    """Return a function that loads a state dict into a network.

    Args:
        weights: A file (.safetensors, or of torch.save), the value of model.weights.  None: nothing is loaded.
        with_head: Whether the last linear layer, the classifier, is loaded too.

    Returns:
        A function that changes the network given to it, and returns None.
    """

    def load(network: nn.Module) -> None:
        """Load the tensors of the file `weights` into a network, in place; do nothing if `weights` is None.

        The classifier keeps its random values, except if `with_head` is True.

        Raises:
            ConfigError: The file does not exist, cannot be read, or is not of this network.
        """
        if weights is None:
            return
        path = Path(weights)
        require(
            path.is_file(),
            f"model.weights={weights} {'is a folder' if path.is_dir() else 'does not exist'}: set the path of a file "
            "of weights, or null for random weights",
        )
        load_state(network, read_state(path), f"model.weights={weights}", with_head)

    return load


def load_state(network: nn.Module, state: Mapping[str, Tensor], key: str, with_head: bool = False) -> None:
    """Load all tensors, by default except those of the classifier, the last linear layer.

    Args:
        network: The network.
        state: The state dict.
        key: Option and value that name the state dict, for the message.
        with_head: Whether the classifier is loaded too.

    Raises:
        ConfigError: Names or shapes are not those of the network.
    """
    classifier = None if with_head else classifier_of(network)
    body = {name: t for name, t in state.items() if name.rpartition(".")[0] != classifier}
    expected = network.state_dict()
    wrong = [name for name, t in body.items() if name not in expected or expected[name].shape != t.shape]
    wrong += [name for name in expected if name not in body and name.rpartition(".")[0] != classifier]
    require(
        not wrong,
        f"{key} is not of this network: names or shapes differ in {', '.join(wrong[:3])}. Set the "
        "options of model to those of the network from which the file was saved",
    )
    network.load_state_dict(body, strict=False)  # not strict, as the classifier may be left out


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the state dict of a file: its tensors by the names of parameters and buffers.

    Args:
        path: A .safetensors file, or a file of torch.save.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else read_weights(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.weights={path} cannot be read: {first_line(error)}. Set the path of a .safetensors file, or of a "
            "file that torch.save wrote from a state dict"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file by name; raise ValueError if the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def require_name(name: str, names: Iterable[str], library: str) -> None:
    """Check that a library has a network.

    Args:
        name: The network, the value of model.name.
        names: The networks of the library.
        library: The library, for the message.

    Raises:
        ConfigError: It does not.  The message lists similar names.
    """
    names = list(names)
    suggestions = difflib.get_close_matches(name, names, n=4) or sorted(names)[:6]
    require(
        name in names,
        f"model.name={name} is not a network of {library}: choose one that it has, such as {', '.join(suggestions)}",
    )


def refuse_options(options: Mapping[str, Any] | None, weights: str | None) -> None:
    """Check that a network with stored weights is given no options, because its configuration is stored with them.

    Args:
        options: The value of model.options.
        weights: The value of model.weights.

    Raises:
        ConfigError: Both are set.
    """
    require(
        weights is None or not options,
        f"model.options={options} changes the configuration of random weights, but model.weights={weights} has its "
        "own: omit model.options",
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; if this is empty, the name of the error's class."""
    return next(iter(str(error).splitlines()), type(error).__name__)
