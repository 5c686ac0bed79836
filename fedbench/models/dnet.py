"""D-Net: pFedNet's DenseNet-BC for patches of 32 x 32, with 197,936 parameters for 3 channels and 2 classes.

Huang et al., CVPR 2017: each layer appends channels to those of all previous layers.  A 1x1 bottleneck precedes each
3x3 convolution, and transitions halve channels and sides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require
from fedbench.models._norms import Norm, norm_layer

BOTTLENECK = 4  # channels of the bottleneck, in multiples of growth


class DenseLayer(nn.Module):
    """[B, inputs, H, W] -> [B, inputs + growth, H, W]."""

    def __init__(self, inputs: int, growth: int, norm: str):
        super().__init__()
        self.norm1 = norm_layer(norm, inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = norm_layer(norm, BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, inputs, H, W] with `growth` new channels after its own.  # [B, inputs + growth, H, W]"""
        new = self.conv2(self.relu(self.norm2(self.conv1(self.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)


class DNet(nn.Module):
    """[B, channels, H, W] -> [B, C].

    Args:
        growth: Channels that a layer appends.
        layers: Layers of each of the three blocks.
        norm: batch, group, instance or none.
    """

    def __init__(
        self, input_shape: tuple, num_classes: int, growth: Count = 6, layers: Count = 16, norm: Norm = "batch"
    ):
        super().__init__()
        require(
            len(input_shape) == 3 and all(side % 4 == 0 for side in input_shape[1:]),
            "model=dnet halves images twice: it needs [channels, height, width] with sides divisible by 4, but the "
            f"data set gives {tuple(input_shape)}: set dataset.resize=32 if the data set has this option, or choose "
            "another model",
        )
        channels = 2 * growth
        body: list[nn.Module] = [nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range(layers):
                body.append(DenseLayer(channels, growth, norm))
                channels += growth
            body += [norm_layer(norm, channels), nn.ReLU()]
            if block < 2:
                half = channels // 2
                body += [nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)]
                channels = half
        self.body = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, channels, H, W]."""
        return self.head(self.body(x))
