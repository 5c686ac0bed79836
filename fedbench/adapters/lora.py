"""LoRA: a linear layer plus a product of two thin ones.

Hu et al., ICLR 2022:  y = W x + b + (alpha / r) B A x,  A [r, in], B [out, r], from B = 0 on: nothing changes at first.
The mean of clients' B times the mean of their A is not the mean of their B A (docs/adapters.md).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.adapters.base import Adapter
from fedbench.core.options import Count, Positive


class LoRA(Adapter):
    """rank: r.  alpha: of the product's weight, alpha / r.  Adapts linear layers."""

    def __init__(
        self,
        places: Sequence[str] = ("*",),
        rank: Count = 8,
        alpha: Positive = 8.0,
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, train)
        self.rank, self.alpha = rank, alpha

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """A linear layer with its product."""
        return LoRALinear(layer, self.rank, self.alpha) if type(layer) is nn.Linear else None

    def peft_config(self, layers: Mapping[str, nn.Module]) -> dict[str, Any] | None:
        """peft's LoraConfig; None where a subclass put in other layers."""
        if any(type(layer) is not LoRALinear for layer in layers.values()):
            return None
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            # peft takes words of a list for the ends of names: "head" would be "blocks.0.head", too
            "target_modules": "|".join(re.escape(name) for name in layers),
        }


class LoRALinear(nn.Module):
    """[..., in] -> [..., out].  Names as peft's, which its files need."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base_layer, self.scale = layer, alpha / rank
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b + (alpha / r) B A x."""
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))

    def merged(self) -> nn.Linear:
        """A linear layer of W + (alpha / r) B A, and b."""
        layer = copy.deepcopy(self.base_layer)
        with torch.no_grad():
            layer.weight += self.scale * self.lora_B.weight @ self.lora_A.weight  # [out, in]
        return layer
