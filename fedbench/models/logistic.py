"""Multinomial logistic regression: one linear layer, which is the head.

With l1=1, bias=false and dataset.constant=true it is the linear model of pFedNet's released code, whose loss includes
the sum of the absolute weights.  That code has one row of weights for two classes, this model has two.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedbench.core.options import NonNegative


class Logistic(nn.Module):
    """[B, ...] -> [B, C].

    Args:
        bias: Whether the layer has a bias.
        l1: Weight of sum |W| in the loss.  If positive, the module also returns this term.
    """

    def __init__(self, input_shape: tuple, num_classes: int, bias: bool = True, l1: NonNegative = 0.0):
        super().__init__()
        self.body = nn.Flatten()
        self.l1 = l1
        self.head = nn.Linear(math.prod(input_shape), num_classes, bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, C] for inputs x [B, ...].

        If the option l1 is positive, return (logits, penalty) with l1 times the sum of absolute weights for each sample
        [B].
        """
        logits = self.head(self.body(x))
        if not self.l1:
            return logits
        return logits, (self.l1 * self.head.weight.abs().sum()).expand(len(x))
