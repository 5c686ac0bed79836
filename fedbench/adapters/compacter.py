"""Compacter: bottlenecks whose layers are sums of Kronecker products, one factor of which all of them share.

Karimi Mahabadi et al., NeurIPS 2021.  Of a layer in -> out, with n the number of summands:
    y = x H + b,   H = sum_i A_i (x) (s_i t_i),   A_i [n, n] shared by all layers,  s_i [in/n, r],  t_i [r, out/n].
Places are Houlsby et al.'s.  Departs from the library adapters, where A's deviation is 1e-4 if A is shared, else 0.01:
0.01 here.  From 1e-4, a step of plain SGD at 0.1 is below what float32 resolves in s and t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedbench.adapters.bottleneck import ACTIVATIONS, Bottleneck, named_network
from fedbench.core.options import Count, require
from fedbench.nn.units import Parts

INITIAL = 0.01  # standard deviation of A


class Compacter(Bottleneck):
    """n: summands, which divides the width and the layers' own.  rank: r of s_i t_i.  All else is the bottleneck's."""

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
        self.neutral = False  # nothing is 0 at first but biases
        require(width % n == 0, f"adapter.n={n} must divide adapter.width={width}")
        self.n, self.rank = n, rank
        self.rules: dict[str, Rule] = {}  # of the model that is being adapted: the adapters' and their twins'

    def _adapt_all(self, model: nn.Module, patterns: Sequence[str]) -> list[str]:
        self.rules = {}
        return super()._adapt_all(model, patterns)

    def network(self, read: int, written: int, name: str) -> nn.Sequential:
        """down, act and up, which read one rule; the first network of a model holds it."""
        for size in (read, written):
            require(
                size % self.n == 0, f"adapter.n={self.n} must divide the {size} numbers of the layers at its places"
            )
        holds = name not in self.rules
        rule = self.rules.setdefault(name, Rule(self.n)) if holds else self.rules[name]
        down, up = PHMLinear(rule, read, self.width, self.rank), PHMLinear(rule, self.width, written, self.rank)
        if holds:
            down.add_module("rule", rule)
        return named_network(down, ACTIVATIONS[self.activation](), up)


class Rule(nn.Module):
    """A [n, n, n]: the left factor of every layer's summands."""

    def __init__(self, n: int):
        super().__init__()
        self.A = nn.Parameter(INITIAL * torch.randn(n, n, n))


class PHMLinear(nn.Module):
    """[..., in] -> [..., out]: x H + b.  rule: who holds A, a part of this module in one layer of a model alone."""

    def __init__(self, rule: Rule, inputs: int, outputs: int, rank: int):
        super().__init__()
        self._rule = (rule,)  # in a tuple, it is no submodule
        n = len(rule.A)
        self.s = nn.Parameter(torch.empty(n, inputs // n, rank))
        self.t = nn.Parameter(torch.empty(n, rank, outputs // n))
        self.bias = nn.Parameter(torch.zeros(outputs))
        for factor in (*self.s, *self.t):
            nn.init.xavier_uniform_(factor.detach())

    def forward(self, x: Tensor) -> Tensor:
        """H is never written out: its factors are applied one after the other."""
        A = self._rule[0].A  # [i, p, a]
        x = x.unflatten(-1, (len(A), -1))  # [..., p, q]
        x = torch.einsum("...pq,iqr->...ipr", x, self.s)
        x = torch.einsum("...ipr,ipa->...iar", x, A)
        return torch.einsum("...iar,irc->...ac", x, self.t).flatten(-2) + self.bias

    def weight(self) -> Tensor:
        """H, written out.  # [in, out]"""
        return _written_out(self._rule[0].A, self.s, self.t)

    # -- hidden units: c of each of n blocks together, or H would be no such sum any more --------------------
    def units_given(self) -> tuple[int, int, Parts]:
        """Positions within a block, blocks, and what is renumbered: t's columns and the bias."""
        n, rank, size = self.t.shape
        return size, n, {"t": ((n, rank, size), 2), "bias": ((n, size), 1)}

    def units_read(self) -> Parts:
        """s's rows."""
        return {"s": (tuple(self.s.shape), 1)}

    def incoming(self, named: Mapping[str, Tensor], prefix: str) -> Tensor:
        """Columns (a, c) of H for all a, of each c.  # [k, m / n, n in]"""
        which = ".twin." if ".twin." in prefix else ".adapter."
        (A,) = (t for name, t in named.items() if name.endswith(f"{which}down.rule.A"))  # [k, n, n, n]
        H = torch.vmap(_written_out)(A, named[f"{prefix}s"], named[f"{prefix}t"])  # [k, in, out]
        return H.unflatten(2, (len(self.t), -1)).permute(0, 3, 2, 1).flatten(2)


def _written_out(A: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """sum_i A_i (x) (s_i t_i): A [n, n, n], s [n, in / n, r], t [n, r, out / n].  # [in, out]"""
    return torch.einsum("ipa,iqc->pqac", A, s @ t).flatten(2).flatten(0, 1)
