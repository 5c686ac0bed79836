"""AppleNet: the LeNet of APPLE's released code, also used for the FedSLD tables.

431,080 parameters for MNIST, 432,080 for CIFAR-10, 431,581 for OrganMNIST, 431,579 for PathMNIST, at 28x28.
"""

from __future__ import annotations

from fedbench.core.options import Count
from fedbench.models._two_convolutions import TwoConvolutions


class AppleNet(TwoConvolutions):
    """TwoConvolutions with 20 and 50 filters.  [B, channels, H, W] -> [B, C].

    Args:
        width: Width of the hidden linear layer.
    """

    def __init__(self, input_shape: tuple, num_classes: int, width: Count = 500):
        super().__init__(input_shape, num_classes, filters=(20, 50), width=width, name="applenet")
