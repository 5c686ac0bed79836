"""An adapter of somebody's own, a right one."""

from __future__ import annotations

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


class IA3(Adapter):
    """A right one: Liu et al., NeurIPS 2022."""

    layer: type[nn.Module] = Scaled

    def __init__(self) -> None:
        super().__init__(["blocks.*"], ["head.*"])

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        return self.layer(layer) if isinstance(layer, nn.Linear) else None
