"""Multinomial logistic regression: one linear layer, which is also the head.

With l1=1, bias=false and dataset.constant=true it is the linear model of pFedNet's released code, whose loss has the
sum of the weights' magnitudes beside the cross-entropy; there one row of weights stands for two classes, here two do.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedbench.core.options import NonNegative


class Logistic(nn.Module):
    """[B, ...] -> [B, C].

    Args:
        bias: Whether the layer has a bias.
        l1: Weight of sum |W| in the loss.  If positive, the module returns this term beside the logits.
    """

    def __init__(self, input_shape: tuple, num_classes: int, bias: bool = True, l1: NonNegative = 0.0):
        super().__init__()
        self.body, self.l1 = nn.Flatten(), l1
        self.head = nn.Linear(math.prod(input_shape), num_classes, bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, C], with l1 also the extra loss of each sample [B]."""
        z = self.head(self.body(x))
        if not self.l1:
            return z
        return z, (self.l1 * self.head.weight.abs().sum()).expand(len(x))
