"""FCN: a small fully convolutional network for segmentation at the size of the image."""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.core.options import Count, require


class FCN(nn.Module):
    """[B, channels, H, W] -> [B, C, H, W], with a receptive field of 11 x 11 pixels.

    Args:
        width: Channels of the hidden layers.
    """

    def __init__(self, input_shape: tuple, num_classes: int, width: Count = 16):
        super().__init__()
        require(
            len(input_shape) == 3,
            f"model=fcn needs images [channels, height, width], but the data set gives {tuple(input_shape)}: choose a "
            "data set of images and masks, or another model",
        )
        layers: list[nn.Module] = []
        for channels, dilation in ((input_shape[0], 1), (width, 1), (width, 3)):
            layers += [nn.Conv2d(channels, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C, H, W], one of each class and pixel, for images x [B, channels, H, W]."""
        return self.head(self.body(x))
