"""torchvision's ResNet-18 for any number of classes, with random weights, those of ImageNet, or those of a file.

He et al., CVPR 2016.  The breast-cancer case study does not name its network.  This one is our choice for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.models._backbone import load_file


class ResNet18(nn.Module):
    """[B, 1 or 3, H, W] -> [B, C].

    Args:
        weights: null; imagenet, which torchvision downloads; or the file of a state dict, whose classifier is not used.
    """

    def __init__(self, input_shape: tuple, num_classes: int, weights: str | None = None):
        super().__init__()
        require(
            len(input_shape) == 3 and input_shape[0] in (1, 3),
            f"model=resnet18 needs images [1 or 3 channels, height, width], but the data set gives "
            f"{tuple(input_shape)}: choose another data set or model",
        )
        try:
            from torchvision.models import ResNet18_Weights, resnet18
        except ImportError as error:
            raise ConfigError(
                "model=resnet18 needs the package torchvision, which is not installed: run pip install torchvision"
            ) from error
        network: Any = resnet18(weights=ResNet18_Weights.IMAGENET1K_V1 if weights == "imagenet" else None)
        if weights != "imagenet":
            load_file(weights)(network)
        network.fc = nn.Linear(network.fc.in_features, num_classes)
        for name, module in network.named_children():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, 1 or 3, H, W]; a grey image is repeated in three channels."""
        x = x.expand(-1, 3, -1, -1)  # [B, 3, H, W]
        for name, module in self.named_children():  # in torchvision's order
            x = module(x.flatten(1) if name == "fc" else x)
        return x
