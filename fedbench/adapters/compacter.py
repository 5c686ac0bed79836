"""Compacter: bottlenecks whose weights are sums of Kronecker products with one factor shared by all layers.

Karimi Mahabadi et al., NeurIPS 2021.  A layer in -> out with n summands computes
    y = x H + b,   H = sum_i A_i (x) (s_i t_i),   A_i [n, n] shared by all layers,  s_i [in/n, r],  t_i [r, out/n].
The adapted layers are those of Houlsby et al.
Departs from the adapters library: A has an initial standard deviation of 0.01 (there 1e-4 if A is shared).
At 1e-4, a step of plain SGD with learning rate 0.1 is below the resolution of float32 in s and t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedbench.adapters.bottleneck import ACTIVATIONS, Bottleneck, named_network
from fedbench.core.options import Count, require
from fedbench.nn.hidden_units import UnitAxes

INITIAL = 0.01  # initial standard deviation of A


class Compacter(Bottleneck):
    """Adapter that adds Compacter bottlenecks.  width: hidden units; n: summands of a weight; rank: of each summand.

    Args:
        places: Patterns of layer names, or attention, mlp and block.
        width: Number of hidden units of the bottleneck; a multiple of n.
        n: Number of summands; must divide the inputs and outputs of the adapted layers.
        rank: Rank r of s_i t_i.
        activation: Nonlinearity.
        twin: Whether each adapted layer has a second bottleneck, whose output is averaged with the first.
        train: Patterns of parameters that are trained besides the bottlenecks.
    """

    def __init__(
        self,
        places: Sequence[str],
        width: Count = 24,
        n: Count = 4,
        rank: Count = 1,
        activation: Literal["relu", "gelu", "silu"] = "gelu",
        twin: bool = False,
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, width, activation, twin=twin, train=train)
        self.neutral = False  # only biases are initialized to 0
        require(
            width % n == 0,
            f"adapter.n={n} must divide adapter.width={width}: set adapter.width to a multiple of {n}, or adapter.n "
            "to a divisor",
        )
        self.n, self.rank = n, rank
        self.shared_rules: dict[str, Rule] = {}  # A of the model being adapted, for "adapter" and for "twin"

    def _adapt_all(self, model: nn.Module, patterns: Sequence[str]) -> list[str]:
        self.shared_rules = {}  # each model has its own A
        return super()._adapt_all(model, patterns)

    def network(self, read: int, written: int, name: str) -> nn.Sequential:
        """Return a bottleneck.  The first one of a model registers A as its parameter, because all layers share A.

        Args:
            read: Number of inputs.
            written: Number of outputs.
            name: Which one of its layer: "adapter" is the first, "twin" the second.
        """
        for size in (read, written):
            require(
                size % self.n == 0,
                f"adapter.n={self.n} must divide {size}, the width of a layer in adapter.places: set adapter.n to a "
                "divisor, or leave the layer out of adapter.places",
            )
        is_first = name not in self.shared_rules
        # rule: module with the parameter A, one for the first bottlenecks of all layers and one for the second ones
        rule = self.shared_rules.setdefault(name, Rule(self.n)) if is_first else self.shared_rules[name]
        down, up = PHMLinear(rule, read, self.width, self.rank), PHMLinear(rule, self.width, written, self.rank)
        if is_first:
            down.add_module("rule", rule)
        return named_network(down, ACTIVATIONS[self.activation](), up)


class Rule(nn.Module):
    """The shared factors A [n, n, n] of all layers."""

    def __init__(self, n: int):
        super().__init__()
        self.A = nn.Parameter(INITIAL * torch.randn(n, n, n))


class PHMLinear(nn.Module):
    """Linear layer x H + b with H = sum_i A_i (x) (s_i t_i), where A is shared by all layers, [..., in] -> [..., out].

    Args:
        rule: The shared factors.  They are a submodule of one layer of a model only.
        inputs: Number of inputs.
        outputs: Number of outputs.
        rank: Rank of s_i t_i.
    """

    def __init__(self, rule: Rule, inputs: int, outputs: int, rank: int):
        super().__init__()
        self._rule = (rule,)  # the tuple keeps it from being registered as a submodule
        n = len(rule.A)
        self.s = nn.Parameter(torch.empty(n, inputs // n, rank))
        self.t = nn.Parameter(torch.empty(n, rank, outputs // n))
        self.bias = nn.Parameter(torch.zeros(outputs))
        for factor in (*self.s, *self.t):
            nn.init.xavier_uniform_(factor.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return x H + b for inputs x [..., in]; the factors of H are applied in turn, without computing H.

        # [..., out]
        """
        # Axes: i summands; p and q: block and position of an input; a and c: block and position of an output; r rank.
        A = self._rule[0].A  # _rule: tuple of the one module that has A  [i, p, a]
        x = x.unflatten(-1, (len(A), -1))  # [..., p, q]
        x = torch.einsum("...pq,iqr->...ipr", x, self.s)
        x = torch.einsum("...ipr,ipa->...iar", x, A)
        return torch.einsum("...iar,irc->...ac", x, self.t).flatten(-2) + self.bias

    def weight(self) -> Tensor:
        """Return the matrix H, by which inputs [..., in] are multiplied from the right.  # [in, out]"""
        return _written_out(self._rule[0].A, self.s, self.t)

    # -- hidden units: unit c is position c of all n blocks, because only such a reordering keeps the form of H ----
    def output_units(self) -> tuple[int, int, UnitAxes]:
        """Return how the hidden units that this layer computes can be reordered.

        The outputs are n blocks of equal size.  Unit c consists of the outputs at position c of all blocks.

        Returns:
            The number of units, which is the size of a block; the number n of blocks; and (shape, axis) of the
            parameters that are reordered with the units: axis 2 of t, and axis 1 of the bias as [n, size].
        """
        n, rank, size = self.t.shape
        return size, n, {"t": ((n, rank, size), 2), "bias": ((n, size), 1)}

    def input_units(self) -> UnitAxes:
        """Return which axis of which parameter belongs to the hidden units that this layer reads.

        Returns:
            {"s": (shape, axis)}: the shape [n, in / n, rank] of s, and 1, the axis to reorder with the units.
        """
        return {"s": (tuple(self.s.shape), 1)}

    def incoming_weights(self, named: Mapping[str, Tensor], prefix: str) -> Tensor:
        """Return the incoming weights of each unit c: the columns (a, c) of H, position c of every block a.

        Args:
            named: Parameters of k clients by name.  # [k, ...] each
            prefix: Beginning of the names of this layer's parameters.

        Returns:
            Weights of the m / n units, for `in` inputs and n blocks.  # [k, m / n, n in]
        """
        # A layer has one bottleneck named adapter, and perhaps a second one named twin.  Each has its own shared A,
        # which is stored in the down projection of only one layer.
        which = ".twin." if ".twin." in prefix else ".adapter."
        (A,) = (t for name, t in named.items() if name.endswith(f"{which}down.rule.A"))  # [k, n, n, n]
        H = torch.vmap(_written_out)(A, named[f"{prefix}s"], named[f"{prefix}t"])  # [k, in, out]
        return H.unflatten(2, (len(self.t), -1)).permute(0, 3, 2, 1).flatten(2)  # len(self.t) is n


def _written_out(A: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return the matrix H = sum_i A_i (x) (s_i t_i), where (x) is the Kronecker product.

    Args:
        A: Shared factors, [n, n, n].
        s: Left factors of rank r, [n, in / n, r].
        t: Right factors of rank r, [n, r, out / n].

    Returns:
        H, [in, out].
    """
    # axes: i summands; p and q: block and position of an input; a and c: block and position of an output
    return torch.einsum("ipa,iqc->pqac", A, s @ t).flatten(2).flatten(0, 1)
