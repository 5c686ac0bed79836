"""A small residual network with batch or group normalization.

He et al., CVPR 2016, the CIFAR form, at a size for CPUs: convolution 3x3, one residual block for each width (stride 2
from the second one), global average pooling, linear head.
"""

from __future__ import annotations

import itertools
from typing import Literal

from torch import Tensor, nn

from fedbench.models._norms import norm_layer


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        same_shape = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the block for x [B, inputs, H, W].

        Returns:
            Outputs; height and width are divided by the stride, and rounded up.  # [B, outputs, H / stride, W / stride]
        """
        z = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(z)) + self.short(x))


class ResNet(nn.Module):
    """[B, channels, H, W] -> [B, C].

    Args:
        widths: Channels of each block.
        norm: batch or group.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        widths: list[int] = [16, 32],  # noqa: B006
        norm: Literal["batch", "group"] = "batch",
    ):
        super().__init__()
        blocks = [Block(widths[0], widths[0], stride=1, norm=norm)]
        blocks += [Block(a, b, stride=2, norm=norm) for a, b in itertools.pairwise(widths)]
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], widths[0], 3, 1, 1, bias=False),
            norm_layer(norm, widths[0]),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, channels, H, W]."""
        return self.head(self.body(x))
