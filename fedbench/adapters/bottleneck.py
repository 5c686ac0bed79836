"""Bottleneck adapters: a narrow network beside a residual, behind a sublayer or alongside it.

Behind (Houlsby et al., ICML 2019, after attention and mlp; Pfeiffer et al., EACL 2021, after the mlp alone):
    y <- y + U s(D y),   y = sublayer(x);
alongside (He et al., ICLR 2022, parallel):
    y <- sublayer(x) + scale U s(D x).
Departs from Houlsby et al.: U = 0 at first, where they draw small numbers, so that nothing changes until it is trained;
init=normal draws both, with biases of 0, as adapters' library and FedDAT's code (AAAI 2024) do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from fedbench.adapters.base import Adapter, inputs_of
from fedbench.core.options import Count, Positive, require
from fedbench.nn.units import Units, units_between

INITIAL = 0.02  # deviation of init=normal
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Bottleneck(Adapter):
    """width: numbers between D and U.  tap: what D reads, the sublayer's output or its input.  scale: of U's output.
    init: whether U is 0 at first, or D and U are normal of deviation 0.02.  twin: every place has a second bottleneck,
    and adds the mean of both, for methods that give a client two (FedDAT).

    Adapts sublayers of any kind that give rows as wide as their last linear layer (tap=input: read, as their first).
    """

    def __init__(
        self,
        places: Sequence[str],
        width: Count = 16,
        activation: Literal["relu", "gelu", "silu"] = "silu",
        tap: Literal["output", "input"] = "output",
        scale: Positive = 1.0,
        init: Literal["zero_up", "normal"] = "zero_up",
        twin: bool = False,
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, train)
        self.width, self.activation, self.tap, self.scale = width, activation, tap, scale
        self.init, self.neutral, self.twin = init, init == "zero_up", twin
        self.kinds: Mapping[int, Callable[..., nn.Module]] = BEHIND if tap == "output" else ALONGSIDE

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """The sublayer with its bottleneck; one without a linear layer has none."""
        linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        if not linear:
            return None
        require(
            not isinstance(layer, nn.MultiheadAttention),
            f"adapter.places matches {name!r}, an nn.MultiheadAttention, which gives weights beside its rows: name a "
            "layer around it",
        )
        read = linear[-1].out_features if self.tap == "output" else linear[0].in_features
        kind = self.kinds.get(inputs_of(layer))
        require(kind is not None, f"adapter.places matches {name!r}, which reads more than its rows and a mask")
        return kind(layer, self.scale, *self.networks(read, linear[-1].out_features, name))  # type: ignore[misc]

    def networks(self, read: int, written: int, name: str) -> list[nn.Sequential]:
        """The bottlenecks of the place of that name, from `read` numbers to `written`."""
        return [self.network(read, written, which) for which in ("adapter", "twin")[: 1 + self.twin]]

    def network(self, read: int, written: int, name: str) -> nn.Sequential:
        """down, act and up: a bottleneck from `read` numbers to `written`.  name: adapter or twin."""
        down, up = nn.Linear(read, self.width), nn.Linear(self.width, written)
        if self.init == "normal":
            for layer in (down, up):
                nn.init.normal_(layer.weight, std=INITIAL)
                nn.init.zeros_(layer.bias)
        else:
            for p in up.parameters():
                nn.init.zeros_(p)
        return named_network(down, ACTIVATIONS[self.activation](), up)


def named_network(down: nn.Module, act: nn.Module, up: nn.Module) -> nn.Sequential:
    """down, act and up in order, under these names."""
    network = nn.Sequential()
    for name, layer in (("down", down), ("act", act), ("up", up)):
        network.add_module(name, layer)
    return network


class Behind(nn.Module):
    """[...] -> [..., out]: y + scale U s(D y); with a twin, the mean of both in the place of U s(D y)."""

    def __init__(self, layer: nn.Module, scale: float, network: nn.Module, twin: nn.Module | None = None):
        super().__init__()
        self.base_layer, self.adapter, self.twin, self.scale = layer, network, twin, scale

    def units(self) -> Units | None:
        """Those between D and U."""
        return units_between(self.adapter.down, self.adapter.up, "adapter")  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The sublayer's output, adapted."""
        return self.adapted(x, self.base_layer(x))

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the sublayer's input and its output."""
        return y + self.scale * self.change(y)

    def change(self, x: Tensor) -> Tensor:
        """U s(D x)."""
        return self.adapter(x) if self.twin is None else 0.5 * self.adapter(x) + 0.5 * self.twin(x)


class Alongside(Behind):
    """[..., in] -> [..., out]: y + scale U s(D x)."""

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """The output, and what the adapter makes of the input."""
        return y + self.scale * self.change(x)


class BehindMasked(Behind):
    """Behind a sublayer that is told what is masked."""

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:  # type: ignore[override]
        """The sublayer's output, adapted."""
        return self.adapted(x, self.base_layer(x, visible))


class AlongsideMasked(BehindMasked, Alongside):
    """Alongside such a sublayer."""


# by the number of inputs of a sublayer
BEHIND, ALONGSIDE = {1: Behind, 2: BehindMasked}, {1: Alongside, 2: AlongsideMasked}
