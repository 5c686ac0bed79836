"""Multinomial logistic regression: one linear layer, which is also the head."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Logistic(nn.Module):
    """[B, ...] -> [B, C].  zero_init starts from the zero model, the usual choice for a convex problem."""

    def __init__(self, input_shape: tuple, num_classes: int, zero_init: bool = False):
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Linear(math.prod(input_shape), num_classes)
        if zero_init:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.body(x))
