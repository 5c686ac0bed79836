"""FedAvgCNN: the convolutional network of McMahan et al. (AISTATS 2017), as used by PGFed's experiments.

conv 5x5 (32), ReLU, pool 2, conv 5x5 (64), ReLU, pool 2, linear 512, ReLU, linear C; no padding.
878,538 parameters on 3x32x32 with 10 classes, of which 5,130 are the head.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.core.options import require


class FedAvgCNN(nn.Module):
    """[B, channels, H, W] -> [B, C]; H and W at least 16."""

    def __init__(self, input_shape: tuple, num_classes: int, width: int = 512):
        super().__init__()
        require(
            len(input_shape) == 3 and min(input_shape[1:]) >= 16,
            f"model=fedavg_cnn needs images of at least 16x16, but the data set gives {tuple(input_shape)}: "
            "choose model=mlp or set dataset.resize=28",
        )
        channels, *sides = input_shape
        rows, cols = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * rows * cols, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.body(x))
