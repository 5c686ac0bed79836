"""AdapterFusion: in each adapted layer, attention weights several bottlenecks for every token.

Pfeiffer et al., EACL 2021, after every block.  For n bottlenecks with outputs z_i = U_i s(D_i y),
    y <- y + V sum_i p_i z_i,   p = softmax_i((Q y + q) . (K z_i + k)),   y = x + mlp(norm(x)).
There are two stages.  First, bottlenecks are trained one by one (adapter=pfeiffer).  Then they are frozen, and Q, K and
V are trained to combine them.  `adapters` names the files of frozen bottlenecks, or sets a number of new bottlenecks
that are trained together with Q, K and V.
Departs from the paper: V is initialized to the identity without noise of 1e-6, and is not regularized towards it.
Limits: k does not affect outputs, because it adds the same number to all n scores; its gradient is 0 up to rounding.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.adapters.bottleneck import INITIAL, Added, BeforeNorm, Bottleneck, Kinds, WithMore
from fedbench.core.options import ConfigError, Count, Positive, listed, require
from fedbench.core.weights import read_weights

State = Mapping[str, Tensor]


class Fusion(Bottleneck):
    """Adapter that combines bottlenecks in each layer by attention.  files: their parameters, if read.

    Args:
        places: Patterns of layer names, or attention, mlp and block.
        adapters: Number of new bottlenecks in each adapted layer, or a pattern of files (bank/*.pt).  `fedbench export`
            must have written the files of runs with adapter=pfeiffer, the same model and the same places.  Bottlenecks
            of files are frozen, so they are not part of the clients' rows.
        width: Number of hidden units of each bottleneck, including those of files.
        activation: Nonlinearity.
        scale: Factor of the bottlenecks' outputs.
        train: Patterns of parameters that are trained besides the adapter.
    """

    def __init__(
        self,
        places: Sequence[str],
        adapters: Count | str = 2,
        width: Count = 16,
        activation: Literal["relu", "gelu", "silu"] = "relu",
        scale: Positive = 1.0,
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, width, activation, scale=scale, train=train)
        self.adapters, self.neutral = adapters, not isinstance(adapters, str)
        self.kinds = KINDS
        self.files: dict[Path, State] = {}  # adapter parameters of each file
        self.used: set[str] = set()  # names of the files' parameters that were loaded into the model

    def add(self, model: nn.Module) -> list[str]:
        """Adapt the layers.

        Returns:
            Names of the new trained parameters.

        Raises:
            ConfigError: The files were trained in another model or have adapters in other layers.
        """
        # If `adapters` names files, they are read once, when the model is built first, and compared with this model.
        # Models that are built again have other random frozen parameters.  used: names of the parameters in use.
        self.files, self.used = self.files or self._read(model), set()
        new, parameters = super().add(model), dict(model.named_parameters())
        for path, state in self.files.items():
            unused = state.keys() - self.used  # parameters of the file that were not copied into a bottleneck
            require(
                not unused,
                f"{self._key}: {path} also has {min(unused, default='')}, for which the model has no layer: set "
                "adapter.places as in the run that wrote the file; if that run had adapter.twin=true, use one with "
                "adapter.twin=false",
            )
        return [name for name in new if parameters[name].requires_grad]

    def networks(self, read: int, written: int, name: str) -> list[nn.Sequential]:
        """Return the bottlenecks of a layer: as many new ones as `adapters` states, or a frozen one of each file.

        Args:
            read: Number of inputs of each bottleneck.
            written: Number of its outputs.
            name: Name of the layer in the model.
        """
        if not self.files:
            assert isinstance(self.adapters, int)
            return [self.network(read, written, name) for _ in range(self.adapters)]
        # _of_file: loads the parameters of this layer from a file into a bottleneck, and freezes it
        return [self._of_file(path, self.network(read, written, name), name) for path in self.files]

    # -- files -------------------------------------------------------------------------------------------
    @property
    def _key(self) -> str:
        return f"adapter.adapters={self.adapters}"

    def _read(self, model: nn.Module) -> dict[Path, State]:
        """Return the adapter parameters of each file that matches the option `adapters`.

        Args:
            model: The model, with which the frozen parameters in the files are compared.

        Returns:
            A dict from file to {parameter name: tensor}.  Empty if the option is a number of new bottlenecks.

        Raises:
            ConfigError: No file matches, or a file cannot be read or has another backbone.
        """
        if not isinstance(self.adapters, str):
            return {}
        paths = sorted(map(Path, glob.glob(self.adapters)))
        require(
            bool(paths),
            f"{self._key}: no file matches this pattern. Set the path or a pattern (bank/*.pt) of files that fedbench "
            "export wrote, or a number of new bottlenecks",
        )
        backbone = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        return {path: self._added(path, backbone) for path in paths}

    def _added(self, path: Path, backbone: State) -> State:
        """Return the adapter parameters of a file by name.

        Args:
            path: The file.
            backbone: Frozen parameters of the model by name.

        Raises:
            ConfigError: The file cannot be read, or its backbone differs from the model's.
        """
        try:
            state = read_weights(path, mmap=True)
        except ValueError as error:
            raise ConfigError(
                f"{self._key}: {path} cannot be read as a file of fedbench export: export the run again, or write a "
                "pattern that does not match this file"
            ) from error
        # an adapter keeps the original layer as base_layer; without it, names are those of the bare model
        unwrapped = {name.replace(".base_layer.", "."): t for name, t in state.items()}
        for name, p in backbone.items():
            require(
                name in unwrapped and unwrapped[name].shape == p.shape and torch.equal(unwrapped[name], p.cpu()),
                f"{self._key}: the frozen parameter {name} in {path} differs from the model's. Set the model, "
                "model.weights and the seed as in the run from which the file was exported",
            )
        # twin: the second adapter of a layer (option adapter.twin)
        return {n: t.clone() for n, t in unwrapped.items() if ".adapter." in n or ".twin." in n}

    def _of_file(self, path: Path, network: nn.Sequential, layer_name: str) -> nn.Sequential:
        """Load a file's parameters of one layer into a bottleneck, freeze it and return it.

        Args:
            path: The file.
            network: The bottleneck.
            layer_name: Name of the layer in the model.

        Raises:
            ConfigError: The file does not have the layer, or has another width.
        """
        state = self.files[path]
        for name, p in network.named_parameters():
            full = f"{layer_name}.adapter.{name}"
            require(
                full in state,
                f"{self._key}: {path} has no {full}; its adapter parameters are {listed(state) or 'none'}. Set "
                "adapter.places as in the run from which the file was exported",
            )
            require(
                state[full].shape == p.shape,
                f"{self._key}: {full} has shape {tuple(state[full].shape)} in {path}, but {tuple(p.shape)} with "
                f"adapter.width={self.width}: set adapter.width as in the run from which the file was exported",
            )
            p.data.copy_(state[full])
            self.used.add(full)
        return network.requires_grad_(False)


class Fused(Added):
    """A layer with output y that is adapted to y + V sum_i p_i z_i, [...] -> [..., d]."""

    def __init__(self, layer: nn.Module, scale: float, *adapters: nn.Module):
        super().__init__(layer, scale)
        self.adapters = nn.ModuleList(adapters)
        width = adapters[0].up.out_features  # type: ignore[union-attr]
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)  # type: ignore[arg-type]
        self.value = nn.Linear(width, width, bias=False)  # type: ignore[arg-type]
        for score in (self.query, self.key):
            nn.init.normal_(score.weight, std=INITIAL)
            nn.init.zeros_(score.bias)
        nn.init.eye_(self.value.weight)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Return V sum_i p_i z_i, which is added to the output of the layer.

        z_i are the outputs of the n bottlenecks `adapters`, multiplied by `scale`.  p_i are their attention weights, by
        the linear maps `query` of y and `key` of z_i, and V is the linear map `value`.

        Args:
            x: Input of the layer, unused.
            y: Output of the layer, [..., d].

        Returns:
            The term, [..., d].
        """
        z = torch.cat(
            [(self.scale * adapter(y)).unflatten(-1, (1, -1)) for adapter in self.adapters], -2
        )  # [..., n, d]
        query = self.query(y).unflatten(-1, (1, -1))  # [..., 1, d]
        mean = F.scaled_dot_product_attention(query, self.key(z), z, scale=1.0)  # [..., 1, d]
        return self.value(mean.flatten(-2))


class FusedWithMore(WithMore, Fused):
    """`Fused` for a layer that also takes a mask or options."""


class FusedNorm(BeforeNorm, Fused):
    """`Fused` for a block that ends in a layer norm."""


KINDS: Kinds = {"rows": Fused, "more": FusedWithMore, "norm": FusedNorm}
