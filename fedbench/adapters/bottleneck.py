"""Bottleneck adapters: narrow networks added to the output of a sublayer or block, in sequence or in parallel.

Notation: x is the residual stream, x' its normalized form, o = sublayer(x'), and A(h) = U s(D h).
    Houlsby et al., ICML 2019, behind attention and mlp:    x + o + A(o);
    Pfeiffer et al., EACL 2021, behind the block:           y + A(y),   y = x + o of the mlp;
    parallel, He et al., ICLR 2022, alongside the mlp:      x + o + scale A(x').
If a block ends in a layer norm (BERT), Pfeiffer's adapter reads the norm's output and adds to the norm's input, as in
the adapters library: norm(y + A(norm(y))).
Departs from Houlsby et al.: U and its bias are initialized to 0 instead of small random values, so a newly adapted
model has the outputs of the original one.  D has PyTorch's default initialization.  init=normal draws the weights of
both and sets the biases to 0, as the adapters library and FedDAT's code (AAAI 2024) do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fedbench.adapters.base import Adapter, takes_more
from fedbench.core.options import Count, Positive
from fedbench.nn.hidden_units import HiddenUnits, hidden_units_between
from fedbench.nn.stream import Stream

INITIAL = 0.02  # standard deviation of init=normal
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Bottleneck(Adapter):
    """Adapter that adds a bottleneck of `width` hidden units to a sublayer or a block.

    It adapts layers whose output width is that of their last linear layer (tap=input: whose input width is that of
    their first), and layer norms that end a block.

    Args:
        places: Patterns of layer names, or attention, mlp and block.
        width: Number of hidden units of the bottleneck.
        activation: Nonlinearity s.
        tap: What D reads: the sublayer's output or its input.
        scale: Factor of U's output.
        init: "zero_up" initializes U to 0; "normal" draws D and U with standard deviation 0.02.
        twin: Whether each adapted layer has a second bottleneck, whose output is averaged with the first.
        train: Patterns of parameters that are trained besides the bottlenecks.
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
        """Return a module that adds a bottleneck to a layer.

        Args:
            layer: The layer.
            name: Its name in the model.

        Returns:
            The module.  None: the layer has no linear layer, and is no layer norm or `Stream` at the end of a block.
        """
        # tap: whether the bottleneck reads the layer's output or its input; Stream: marks the end of a block
        linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        if self.tap == "output" and isinstance(layer, nn.LayerNorm | Stream):
            read = written = layer.width if isinstance(layer, Stream) else layer.normalized_shape[-1]
        elif linear:
            written = linear[-1].out_features
            read = written if self.tap == "output" else linear[0].in_features
        else:
            return None
        # kinds: from a word to the class of the adapted layer
        if isinstance(layer, nn.LayerNorm):  # it ends a block
            kind = "norm"
        else:
            kind = "more" if takes_more(layer) else "rows"  # rows: it takes x alone; more: also a mask or options
        return self.kinds[kind](layer, self.scale, *self.networks(read, written, name))

    def networks(self, read: int, written: int, name: str) -> list[nn.Sequential]:
        """Return the bottlenecks of a layer: one, or two with twin=true.

        Args:
            read: Number of inputs of each bottleneck.
            written: Number of its outputs.
            name: Name of the layer in the model, unused here; subclasses look up files by it.
        """
        return [self.network(read, written, which) for which in ("adapter", "twin")[: 1 + self.twin]]

    def network(self, read: int, written: int, name: str) -> nn.Sequential:
        """Return a bottleneck.

        Args:
            read: Number of inputs.
            written: Number of outputs.
            name: Which one of its layer, unused here: "adapter" is the first, "twin" the second.
        """
        down, up = nn.Linear(read, self.width), nn.Linear(self.width, written)
        if self.init == "normal":
            for layer in (down, up):
                nn.init.normal_(layer.weight, std=INITIAL)  # 0.02
                nn.init.zeros_(layer.bias)
        else:  # a new bottleneck returns 0
            for p in up.parameters():
                nn.init.zeros_(p)
        return named_network(down, ACTIVATIONS[self.activation](), up)  # ACTIVATIONS: class of each activation by name


def named_network(down: nn.Module, act: nn.Module, up: nn.Module) -> nn.Sequential:
    """Return an nn.Sequential of the layers down, act and up, in this order; its children have these names."""
    network = nn.Sequential()
    for name, layer in (("down", down), ("act", act), ("up", up)):
        network.add_module(name, layer)
    return network


class Added(nn.Module):
    """A layer whose output is increased by `added`, [...] -> [..., out]."""

    def __init__(self, layer: nn.Module, scale: float):
        super().__init__()
        self.base_layer, self.scale = layer, scale

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the term that is added to the layer's output.  Subclasses implement it.

        Args:
            x: Input of the layer.  # [..., in]
            y: Output of the layer.  # [..., out]

        Returns:
            The term.  # [..., out]
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x [..., in] plus the output of `added`.  # [..., out]"""
        y = self.base_layer(x)
        return y + self.added(x, y)


class WithMore(Added):
    """A layer whose output is increased by `added`, and that also takes a mask or options, or returns a tuple."""

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Any:
        """Return the layer's output plus `added`.  If the layer returns a tuple, `added` goes to its first element.

        Args:
            x: Input of the layer, [..., in].
            *more: Further inputs of the layer, such as a mask.
            **options: Keyword options of the layer.
        """
        out = self.base_layer(x, *more, **options)
        if isinstance(out, tuple):
            return out[0] + self.added(x, out[0]), *out[1:]
        return out + self.added(x, out)


class BeforeNorm(Added):
    """`Added` for the layer norm that ends a block: norm(x + added(norm(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(x + added(norm(x))) for x [..., width], the input of the layer norm `norm`."""
        return self.base_layer(x + self.added(x, self.base_layer(x)))


class Behind(Added):
    """Layer with output y, a bottleneck of y: y + scale U s(D y), activation s.  Of two, the mean is added."""

    def __init__(self, layer: nn.Module, scale: float, network: nn.Module, twin: nn.Module | None = None):
        super().__init__(layer, scale)
        self.adapter, self.twin = network, twin

    def hidden_units(self) -> HiddenUnits | None:
        """Return the hidden units of the first bottleneck, or None if they cannot be reordered.

        They can be if its layers are linear, or those of adapter=compacter.
        """
        return hidden_units_between(self.adapter.down, self.adapter.up, "adapter")  # type: ignore[arg-type]

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the bottleneck's output for y times the option scale.

        Args:
            x: Input of the layer; unused here.
            y: Output of the layer, the input of the bottleneck.  # [..., out]

        Returns:
            The term that is added to y.  # [..., out]
        """
        return self.scale * self.change(y)

    def change(self, x: Tensor) -> Tensor:
        """Return the bottleneck's output for its input x, without scale; with two bottlenecks, their mean.

        # [..., out]
        """
        return self.adapter(x) if self.twin is None else 0.5 * self.adapter(x) + 0.5 * self.twin(x)


class Alongside(Behind):
    """Layer of input x and output y, bottleneck of x: y + scale U s(D x), activation s.  Of two, the mean is added."""

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the bottleneck's output for x times the option scale.

        Args:
            x: Input of the layer and of the bottleneck.  # [..., in]
            y: Output of the layer; unused here.

        Returns:
            The term that is added to y.  # [..., out]
        """
        return self.scale * self.change(x)


class BehindWithMore(WithMore, Behind):
    """`Behind` for a layer that also takes a mask or options."""


class AlongsideWithMore(WithMore, Alongside):
    """`Alongside` for a layer that also takes a mask or options."""


class BehindNorm(BeforeNorm, Behind):
    """`Behind` for a block that ends in a layer norm."""


# wrapper class by kind of layer: "more", it also takes a mask or options; "norm", it ends a block; "rows", any other
Kinds = Mapping[str, Callable[..., nn.Module]]
BEHIND: Kinds = {"rows": Behind, "more": BehindWithMore, "norm": BehindNorm}
ALONGSIDE: Kinds = {"rows": Alongside, "more": AlongsideWithMore}
