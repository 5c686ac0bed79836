"""Multilayer perceptron on the flattened input: hidden widths, ReLU, linear head."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn


class MLP(nn.Module):
    """[B, ...] -> [B, C].  hidden=[64] on 8x8 digits is the 64-64-10 network of the benchmarks."""

    def __init__(self, input_shape: tuple, num_classes: int, hidden: list[int] = [64]):  # noqa: B006
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.body(x))
