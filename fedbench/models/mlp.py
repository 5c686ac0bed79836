"""Multilayer perceptron: flattened input, hidden layers with ReLU, linear head."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn


class MLP(nn.Module):
    """[B, ...] -> [B, C].

    Args:
        hidden: Widths of the hidden layers.
    """

    def __init__(self, input_shape: tuple, num_classes: int, hidden: list[int] = [64]):  # noqa: B006
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for inputs x [B, ...]; each sample is flattened to a vector."""
        return self.head(self.body(x))
