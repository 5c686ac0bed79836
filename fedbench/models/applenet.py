"""AppleNet: the LeNet of APPLE's released code, also used for the FedSLD tables.

conv 5x5 (20), ReLU, pool 2, conv 5x5 (50), ReLU, pool 2, linear 500, ReLU, linear C; no padding.
On 28x28: 431,080 parameters for MNIST, 432,080 for CIFAR-10, 431,581 for OrganMNIST, 431,579 for PathMNIST.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.core.options import Count, require


class AppleNet(nn.Module):
    """[B, channels, H, W] -> [B, C]; H and W at least 16 (28 in the papers).  width: of the last hidden layer."""

    def __init__(self, input_shape: tuple, num_classes: int, width: Count = 500):
        super().__init__()
        require(
            len(input_shape) == 3 and min(input_shape[1:]) >= 16,
            f"model=applenet needs images of at least 16x16, but the data set gives {tuple(input_shape)}: "
            "choose model=mlp or set dataset.resize=28",
        )
        channels, *sides = input_shape
        rows, cols = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.body = nn.Sequential(
            nn.Conv2d(channels, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * rows * cols, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.body(x))
