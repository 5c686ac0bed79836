"""Bottleneck adapters: a narrow network beside a residual, behind a sublayer, behind a block, or alongside.

Of a sublayer's output o = sublayer(x'), x' being the normalized residual stream x, and A(h) = U s(D h):
    Houlsby et al., ICML 2019, behind attention and mlp:    x + o + A(o);
    Pfeiffer et al., EACL 2021, behind the block:           y + A(y),   y = x + o of the mlp;
    parallel, He et al., ICLR 2022, alongside the mlp:      x + o + scale A(x').
Where a block ends in a layer norm (BERT), Pfeiffer's adapter reads behind the norm and adds before it, as in the
adapters library: norm(y + A(norm(y))).
Departs from Houlsby et al.: U and its bias are 0 at first, where they draw small numbers, so that an adapted model
begins as the bare one; D's weights and biases are PyTorch's uniform ones.  init=normal draws the weights of both, with
biases of 0, as the adapters library and FedDAT's code (AAAI 2024) do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fedbench.adapters.base import Adapter, takes_more
from fedbench.core.options import Count, Positive
from fedbench.nn.stream import Stream
from fedbench.nn.units import Units, units_between

INITIAL = 0.02  # deviation of init=normal
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Bottleneck(Adapter):
    """width: numbers between D and U.  tap: what D reads, the sublayer's output or its input.  scale: of U's output.
    init: whether U is 0 at first, or D and U are normal of deviation 0.02.  twin: every place has a second bottleneck,
    and adds the mean of both, for methods that give a client two (FedDAT).

    Adapts layers of any kind that give rows as wide as their last linear layer (tap=input: read, as their first), and
    layer norms that end a block.
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
        self.kinds: Kinds = BEHIND if tap == "output" else ALONGSIDE

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """The layer with its bottleneck; one without a linear layer has none, but for the end of a block."""
        linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        if self.tap == "output" and isinstance(layer, nn.LayerNorm | Stream):
            read = written = layer.width if isinstance(layer, Stream) else layer.normalized_shape[-1]
        elif linear:
            written = linear[-1].out_features
            read = written if self.tap == "output" else linear[0].in_features
        else:
            return None
        form = "norm" if isinstance(layer, nn.LayerNorm) else "more" if takes_more(layer) else "rows"
        return self.kinds[form](layer, self.scale, *self.networks(read, written, name))

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


class Added(nn.Module):
    """[...] -> [..., out]: what a layer gives, plus `added`."""

    def __init__(self, layer: nn.Module, scale: float):
        super().__init__()
        self.base_layer, self.scale = layer, scale

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """What is added for the layer's input and its output."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, adapted."""
        y = self.base_layer(x)
        return y + self.added(x, y)


class WithMore(Added):
    """The same around a layer that is also given a mask or options, or returns more than its rows."""

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Any:
        """The layer's output, whose first part is adapted where it has several."""
        out = self.base_layer(x, *more, **options)
        if isinstance(out, tuple):
            return out[0] + self.added(x, out[0]), *out[1:]
        return out + self.added(x, out)


class BeforeNorm(Added):
    """The same around the layer norm that ends a block: norm(x + added), which reads norm(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm's output, adapted."""
        return self.base_layer(x + self.added(x, self.base_layer(x)))


class Behind(Added):
    """y + scale U s(D y); with a twin, the mean of both in the place of U s(D y)."""

    def __init__(self, layer: nn.Module, scale: float, network: nn.Module, twin: nn.Module | None = None):
        super().__init__(layer, scale)
        self.adapter, self.twin = network, twin

    def units(self) -> Units | None:
        """Those between D and U."""
        return units_between(self.adapter.down, self.adapter.up, "adapter")  # type: ignore[arg-type]

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the layer's output."""
        return self.scale * self.change(y)

    def change(self, x: Tensor) -> Tensor:
        """U s(D x)."""
        return self.adapter(x) if self.twin is None else 0.5 * self.adapter(x) + 0.5 * self.twin(x)


class Alongside(Behind):
    """y + scale U s(D x)."""

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the layer's input."""
        return self.scale * self.change(x)


class BehindWithMore(WithMore, Behind):
    """Behind such a layer."""


class AlongsideWithMore(WithMore, Alongside):
    """Alongside such a layer."""


class BehindNorm(BeforeNorm, Behind):
    """Behind a block that ends in a layer norm."""


Kinds = Mapping[str, Callable[..., nn.Module]]  # by the form of the adapted layer
BEHIND: Kinds = {"rows": Behind, "more": BehindWithMore, "norm": BehindNorm}
ALONGSIDE: Kinds = {"rows": Alongside, "more": AlongsideWithMore}
