"""A traced graph frees the output of a layer after its last use."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from fedbench.nn import batched_operators
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.traced_graph import trace


class Residual(nn.Module):
    """Six layers.  The output of the first one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Tanh() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, F]."""
        first = self.layers[0](x)
        y = self.layers[2](self.layers[1](first))
        return self.layers[5](self.layers[4](self.layers[3](y + first)))


def test_outputs_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[weakref.ref] = []
    num_alive: list[int] = []  # number of earlier outputs that exist when a layer begins

    def tanh(
        m: nn.Module, name: str, p: batched_operators.Params, x: Tensor, batched: bool, context: ForwardContext
    ) -> Tensor:
        num_alive.append(sum(output() is not None for output in outputs))
        y = x.tanh()
        outputs.append(weakref.ref(y))
        return y

    module = Residual()
    traced = trace(module)
    assert traced is not None
    monkeypatch.setitem(batched_operators.OPERATORS, nn.Tanh, tanh)
    x = torch.randn(3, 4)
    with torch.no_grad():
        got = traced.run({}, (x,), False, ForwardContext())
    assert torch.equal(got, module(x))
    assert num_alive == [0, 1, 2, 0, 1, 1]  # the sum is not the output of a layer, and its terms are freed
