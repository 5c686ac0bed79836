"""A traced module holds a layer's output as long as a later layer reads it, and no longer."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from fedbench.nn import batched_operators
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.traced_graph import trace


class Residual(nn.Module):
    """Six layers, the first of which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Tanh() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, F]."""
        first = self.layers[0](x)
        y = self.layers[2](self.layers[1](first))
        return self.layers[5](self.layers[4](self.layers[3](y + first)))


def test_outputs_that_nothing_reads_any_more_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    alive: list[int] = []  # earlier outputs, when a layer begins

    def tanh(
        m: nn.Module, name: str, p: batched_operators.Params, x: Tensor, batched: bool, context: ForwardContext
    ) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        y = x.tanh()
        made.append(weakref.ref(y))
        return y

    module = Residual()
    traced = trace(module)
    assert traced is not None
    monkeypatch.setitem(batched_operators.OPERATORS, nn.Tanh, tanh)
    x = torch.randn(3, 4)
    with torch.no_grad():
        got = traced.run({}, (x,), False, ForwardContext())
    assert torch.equal(got, module(x))
    assert alive == [0, 1, 2, 0, 1, 1]  # the sum is no layer, and the two it was made of are gone
