"""torchvision's ResNet-18 for any number of classes, its weights random, of ImageNet, or from a file.

He et al., CVPR 2016.  The breast-cancer case study does not state its network; this is our choice for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbench.core.options import ConfigError, require
from fedbench.core.weights import read_weights


class ResNet18(nn.Module):
    """[B, 1 or 3, H, W] -> [B, C].

    weights: null, imagenet (downloaded by torchvision), or the path of a state dict; a head of another size in it
    is left out.
    """

    def __init__(self, input_shape: tuple, num_classes: int, weights: str | None = None):
        super().__init__()
        require(
            len(input_shape) == 3 and input_shape[0] in (1, 3),
            f"model=resnet18 needs images of 1 or 3 channels, but the data set gives {tuple(input_shape)}",
        )
        net: Any = _network(weights)
        net.fc = nn.Linear(net.fc.in_features, num_classes)
        for name, module in net.named_children():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]; a grey image is shown in all three channels."""
        x = x.expand(-1, 3, -1, -1)  # [B, 3, H, W]
        for name, module in self.named_children():  # in torchvision's order
            x = module(x.flatten(1) if name == "fc" else x)
        return x


def _network(weights: str | None) -> nn.Module:
    try:
        from torchvision.models import ResNet18_Weights, resnet18
    except ImportError as error:
        raise ConfigError("model=resnet18 needs torchvision: pip install torchvision") from error
    if weights in (None, "imagenet"):
        return resnet18(weights=ResNet18_Weights.IMAGENET1K_V1 if weights else None)
    net, path = resnet18(weights=None), Path(weights)
    require(path.is_file(), f"model.weights={weights}: there is no such file")
    try:
        stored = read_weights(path)
    except ValueError as error:
        raise ConfigError(f"model.weights={weights} cannot be read: {error}") from error
    body = {name: value for name, value in stored.items() if not name.startswith("fc.")}
    missing, odd = net.load_state_dict(body, strict=False)
    lacking = [*odd, *(name for name in missing if not name.startswith("fc."))]
    require(not lacking, f"model.weights={weights} is no ResNet-18 of torchvision's: see {', '.join(lacking[:3])}")
    return net
