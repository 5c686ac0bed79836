"""A small residual network with a choice of norm: BatchNorm proves buffers-as-columns, GroupNorm has none.

Stem conv 3x3, then one residual block per width (stride 2 from the second on), global average pooling, linear
head: He et al., CVPR 2016, the CIFAR form, at a size that trains on a CPU.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fedbench.models._norms import norm_layer


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (1x1 where the shape changes)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        z = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(z)) + self.short(x))


class ResNet(nn.Module):
    """[B, channels, H, W] -> [B, C]."""

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        widths: list[int] = [16, 32],  # noqa: B006
        norm: Literal["batch", "group"] = "batch",
    ):
        super().__init__()
        blocks = [Block(a, b, 1 if i == 0 else 2, norm) for i, (a, b) in enumerate(zip([widths[0], *widths], widths))]
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
        """Logits [B, C]."""
        return self.head(self.body(x))
