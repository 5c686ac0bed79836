"""U-Net: an encoder that halves the image four times, and a decoder that reads each level of the encoder.

Ronneberger et al., MICCAI 2015, with padded convolutions, normalization and few channels, as in the code released with
pFedNet (f = 8: 486,562 parameters for 3 channels and 2 classes; f = 4: 122,098).
Departs from that code: the loss receives logits.  There, a sigmoid precedes the loss, so that the cross-entropy of two
classes is at least ln(1 + 1/e) = 0.313.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require
from fedbench.models._norms import Norm, norm_layer

LEVELS = 4  # how often the encoder halves the sides


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    """Return two 3x3 convolutions with normalization and ReLU, [B, inputs, H, W] -> [B, outputs, H, W].

    norm is the option of the model: "batch", "instance", "group" or "none".  Only without it, convolutions have biases.
    """
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        bias = norm == "none"
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=bias), norm_layer(norm, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _upsample(channels: int) -> nn.ConvTranspose2d:
    """Return a transposed convolution that halves the channels and doubles height and width of its input."""
    return nn.ConvTranspose2d(channels, channels // 2, 2, 2)


class UNet(nn.Module):
    """[B, channels, H, W] -> [B, C, H, W].

    Args:
        width: f, channels of the first level.  Each further level has twice as many.
        norm: batch, group, instance or none.
    """

    def __init__(self, input_shape: tuple, num_classes: int, width: Count = 8, norm: Norm = "batch"):
        super().__init__()
        require(
            len(input_shape) == 3 and all(side % 2**LEVELS == 0 for side in input_shape[1:]),
            f"model=unet halves images {LEVELS} times: it needs [channels, height, width] with sides divisible by "
            f"{2**LEVELS}, but the data set gives {tuple(input_shape)}. Resize the images (dataset.resize or "
            "dataset.size, if the data set has it), or choose another model",
        )
        widths = [width * 2**level for level in range(LEVELS + 1)]  # f, 2f, 4f, 8f, 16f
        self.encoder1 = _block(input_shape[0], widths[0], norm)
        self.encoder2 = _block(widths[0], widths[1], norm)
        self.encoder3 = _block(widths[1], widths[2], norm)
        self.encoder4 = _block(widths[2], widths[3], norm)
        self.bottleneck = _block(widths[3], widths[4], norm)
        self.upconv4 = _upsample(widths[4])
        self.decoder4 = _block(widths[4], widths[3], norm)
        self.upconv3 = _upsample(widths[3])
        self.decoder3 = _block(widths[3], widths[2], norm)
        self.upconv2 = _upsample(widths[2])
        self.decoder2 = _block(widths[2], widths[1], norm)
        self.upconv1 = _upsample(widths[1])
        self.decoder1 = _block(widths[1], widths[0], norm)
        self.head = nn.Conv2d(widths[0], num_classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C, H, W], one of each class and pixel, for images x [B, channels, H, W]."""
        e1 = self.encoder1(x)
        e2 = self.encoder2(self.pool(e1))
        e3 = self.encoder3(self.pool(e2))
        e4 = self.encoder4(self.pool(e3))
        y = self.bottleneck(self.pool(e4))
        y = self.decoder4(torch.cat([self.upconv4(y), e4], 1))
        y = self.decoder3(torch.cat([self.upconv3(y), e3], 1))
        y = self.decoder2(torch.cat([self.upconv2(y), e2], 1))
        y = self.decoder1(torch.cat([self.upconv1(y), e1], 1))
        return self.head(y)
