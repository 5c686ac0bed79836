"""An adapter of somebody's own, a right one."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedbench.adapters.base import Adapter


class Scaled(nn.Module):
    """Outputs scaled, number by number."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer, self.scale = layer, nn.Parameter(torch.ones(layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scale

    def merged(self) -> nn.Linear:
        """scale (W x + b) = (scale W) x + scale b."""
        layer = copy.deepcopy(self.base_layer)
        with torch.no_grad():
            layer.weight *= self.scale[:, None]  # [out, in]
            layer.bias *= self.scale
        return layer


class Rescale(Adapter):
    """A right one: outputs of all linear layers are scaled."""

    layer: type[nn.Module] = Scaled

    def __init__(self) -> None:
        super().__init__(["blocks.*"], ["head.*"])

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        return self.layer(layer) if isinstance(layer, nn.Linear) else None
