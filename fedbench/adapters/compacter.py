"""Compacter: bottlenecks whose layers are sums of Kronecker products, one factor of which all of them share.

Karimi Mahabadi et al., NeurIPS 2021.  Of a layer in -> out, with n the number of summands:
    y = x H + b,   H = sum_i A_i (x) (s_i t_i),   A_i [n, n] shared by all layers,  s_i [in/n, r],  t_i [r, out/n].
Places are Houlsby et al.'s.  Departs from the library adapters, where A's deviation is 1e-4 if A is shared, else 0.01:
0.01 by default.  From 1e-4, a step of plain SGD at 0.1 is below what float32 resolves in s and t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedbench.adapters.bottleneck import ACTIVATIONS, Bottleneck, named_network
from fedbench.core.options import Count, Positive, require


class Compacter(Bottleneck):
    """n: summands, which divides the width and the layers' own.  rank: r of s_i t_i.  std: of A's normal numbers at
    first.  All else is the bottleneck's."""

    def __init__(
        self,
        places: Sequence[str],
        width: Count = 24,
        n: Count = 4,
        rank: Count = 1,
        std: Positive = 0.01,
        activation: Literal["relu", "gelu", "silu"] = "gelu",
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, width, activation, train=train)
        self.neutral = False  # nothing is 0 at first but biases
        require(width % n == 0, f"adapter.n={n} must divide adapter.width={width}")
        self.n, self.rank, self.std = n, rank, std
        self.rule: Rule | None = None  # of the model that is being adapted

    def _adapt_all(self, model: nn.Module) -> list[str]:
        self.rule = None
        return super()._adapt_all(model)

    def network(self, read: int, written: int) -> nn.Sequential:
        """down, act and up, which read one rule; the first network of a model holds it."""
        for size in (read, written):
            require(
                size % self.n == 0, f"adapter.n={self.n} must divide the {size} numbers of the layers at its places"
            )
        holds = self.rule is None
        rule = self.rule = self.rule or Rule(self.n, self.std)
        down, up = PHMLinear(rule, read, self.width, self.rank), PHMLinear(rule, self.width, written, self.rank)
        if holds:
            down.add_module("rule", rule)
        return named_network(down, ACTIVATIONS[self.activation](), up)


class Rule(nn.Module):
    """A [n, n, n]: the left factor of every layer's summands."""

    def __init__(self, n: int, std: float):
        super().__init__()
        self.A = nn.Parameter(std * torch.randn(n, n, n))


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
        st = self.s @ self.t  # [n, in / n, out / n]
        return torch.stack([torch.kron(a, b) for a, b in zip(self._rule[0].A, st)]).sum(0)
