"""FedAvgCNN: the convolutional network of McMahan et al. (AISTATS 2017), as used in PGFed's experiments.

878,538 parameters on 3x32x32 with 10 classes, of which 5,130 are the head.
"""

from __future__ import annotations

from fedbench.core.options import Count
from fedbench.models._two_convolutions import TwoConvolutions


class FedAvgCNN(TwoConvolutions):
    """TwoConvolutions with 32 and 64 filters.  [B, channels, H, W] -> [B, C].

    Args:
        width: Width of the hidden linear layer.
    """

    def __init__(self, input_shape: tuple, num_classes: int, width: Count = 512):
        super().__init__(input_shape, num_classes, filters=(32, 64), width=width, name="fedavg_cnn")
