"""AdapterFusion: every token weights several bottlenecks by attention, with one attention for each adapted layer.

Pfeiffer et al., EACL 2021, behind every block.  Of n bottlenecks, whose outputs are z_i = U_i s(D_i y),
    y <- y + V sum_i p_i z_i,   p = softmax_i((Q y + q) . (K z_i + k)),   y = x + mlp(norm(x)).
There are two stages.  First, bottlenecks are trained one by one (adapter=pfeiffer).  Then they are frozen, and Q, K, V
learn how to weight them.  `adapters` sets the stage: files of frozen bottlenecks, or a number of new ones that are
trained together with Q, K, V.
Departs from the paper: V is the identity at first, without its noise of 1e-6, and is not regularized towards it.  k
changes no output, because it adds one number to all n scores; its gradient is 0 up to rounding.
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
    """adapters: how many new bottlenecks there are at every place, or a pattern of files (bank/*.pt) that
    fedbench export wrote of runs with adapter=pfeiffer at the same places of the same model: they stand frozen at every
    place, in no row.  width: of each, in files, too.  All else is the bottleneck's.
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
        self.files: dict[Path, State] = {}  # of those of the pattern, what an adapter has added
        self.used: set[str] = set()  # their parameters that stand in the model

    def add(self, model: nn.Module) -> list[str]:
        """Adapt the places; ConfigError where files have adapters for others, or were trained in another model."""
        self.files, self.used = self.files or self._read(model), set()  # further draws keep the first one's backbone
        new, parameters = super().add(model), dict(model.named_parameters())
        for path, state in self.files.items():
            unused = state.keys() - self.used
            require(
                not unused,
                f"{self._key}: {path} has {min(unused, default='')}, too, for which there is no place here: take "
                "adapter.places of its run, which has one bottleneck at each",
            )
        return [name for name in new if parameters[name].requires_grad]

    def networks(self, read: int, written: int, name: str) -> list[nn.Sequential]:
        """New bottlenecks, or those of the files."""
        if not self.files:
            assert isinstance(self.adapters, int)
            return [self.network(read, written, name) for _ in range(self.adapters)]
        return [self._of_file(path, self.network(read, written, name), name) for path in self.files]

    # -- files -------------------------------------------------------------------------------------------
    @property
    def _key(self) -> str:
        return f"adapter.adapters={self.adapters}"

    def _read(self, model: nn.Module) -> dict[Path, State]:
        """What was added in each file's model; ConfigError where another backbone is around it."""
        if not isinstance(self.adapters, str):
            return {}
        paths = sorted(map(Path, glob.glob(self.adapters)))
        require(bool(paths), f"{self._key}: there are no such files")
        backbone = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        return {path: self._added(path, backbone) for path in paths}

    def _added(self, path: Path, backbone: State) -> State:
        try:
            state = read_weights(path, mmap=True)
        except ValueError as error:
            raise ConfigError(f"{self._key}: {path} cannot be read as a file of fedbench export") from error
        bare = {name.replace(".base_layer.", "."): t for name, t in state.items()}
        for name, own in backbone.items():
            require(
                name in bare and bare[name].shape == own.shape and torch.equal(bare[name], own.cpu()),
                f"{self._key}: the backbone of {path} is another one, see {name}; take its run's model, model.weights "
                "and seed",
            )
        return {n: t.clone() for n, t in bare.items() if ".adapter." in n or ".twin." in n}

    def _of_file(self, path: Path, network: nn.Sequential, place: str) -> nn.Sequential:
        """The network with a file's numbers, frozen."""
        state = self.files[path]
        for name, p in network.named_parameters():
            full = f"{place}.adapter.{name}"
            require(
                full in state, f"{self._key}: {path} has no {full}; of adapters it has {listed(state) or 'nothing'}"
            )
            require(
                state[full].shape == p.shape,
                f"{self._key}: {full} is {tuple(state[full].shape)} in {path}, and {tuple(p.shape)} by "
                f"adapter.width={self.width}",
            )
            p.data.copy_(state[full])
            self.used.add(full)
        return network.requires_grad_(False)


class Fused(Added):
    """[...] -> [..., d]: y + V sum_i p_i z_i, for the output y of a layer."""

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
        """V sum_i p_i z_i."""
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
