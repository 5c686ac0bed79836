"""The network shape that AppleNet and FedAvgCNN share."""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.core.options import require


class TwoConvolutions(nn.Module):
    """Convolution 5x5, ReLU, pooling 2, convolution 5x5, ReLU, pooling 2, linear, ReLU, linear; without padding.

    Inputs are [B, channels, H, W] with H and W at least 16, logits are [B, C].

    Args:
        input_shape: Channels, height and width.
        num_classes: C.
        filters: Output channels of both convolutions.
        width: Width of the hidden linear layer.
        name: Option of conf/model, for the message.
    """

    def __init__(self, input_shape: tuple, num_classes: int, filters: tuple[int, int], width: int, name: str):
        super().__init__()
        require(
            len(input_shape) != 2,
            f"model={name} needs images with channels, [channels, height, width], but a sample of the data set is "
            f"{tuple(input_shape)}: store gray images as [samples, 1, height, width], or choose model=mlp",
        )
        require(
            len(input_shape) == 3 and min(input_shape[1:]) >= 16,
            f"model={name} needs images of at least 16x16, but the data set gives {tuple(input_shape)}: "
            "choose model=mlp, or set dataset.resize=28 if the data set has this option",
        )
        channels, *sides = input_shape
        rows, cols = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters[0], 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(filters[0], filters[1], 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(filters[1] * rows * cols, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, channels, H, W]."""
        return self.head(self.body(x))
