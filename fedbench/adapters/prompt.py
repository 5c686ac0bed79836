"""Prompts: tokens that learn, among those that a frozen transformer reads.

Jia et al., ECCV 2022 (in front of the first block); with a text's and an image's own, as FedDAT's code (AAAI 2024)
does PromptFL on ViLT: behind the first token of each, with its modality but without a position.  Departs from that code
where it makes a text's and an image's prompts by one network: each place has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.adapters.base import Adapter, inputs_of
from fedbench.core.options import Count

INITIAL = 0.02  # standard deviation, as of embeddings in BERT
HIDDEN = 192  # numbers of the hidden layer of the network that makes prompts


class Prompt(Adapter):
    """tokens: of each place.  tap: whether they are put into what a layer gives, or into what it reads, [B, T, d],
    behind the first token.  reparam: they are what a small network makes of a table.

    d is what the layer's last parameter, a bias or a weight of its rows, has last.
    """

    neutral = False  # other tokens attend to them from the first step on

    def __init__(
        self,
        places: Sequence[str],
        tokens: Count = 5,
        tap: Literal["output", "input"] = "output",
        reparam: bool = False,
        train: Sequence[str] = ("head.*",),
    ):
        super().__init__(places, train)
        self.tokens, self.tap, self.reparam = tokens, tap, reparam

    def adapt(self, layer: nn.Module, name: str) -> nn.Module | None:
        """The layer with prompts; one without parameters has none, nor one whose mask would have no place for them."""
        parameters = list(layer.parameters())
        if not parameters or isinstance(layer, nn.ModuleList) or inputs_of(layer) != 1:
            return None
        width, network = parameters[-1].shape[-1], nn.Sequential()
        if self.reparam:
            network = nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, width))
        return (PromptBehind if self.tap == "output" else PromptBefore)(layer, self.tokens, width, network)


class PromptBehind(nn.Module):
    """[B, ...] -> [B, T + tokens, d]: what a layer gives, with prompts behind the first token."""

    def __init__(self, layer: nn.Module, tokens: int, width: int, network: nn.Module):
        super().__init__()
        self.base_layer, self.network = layer, network
        self.prompts = nn.Parameter(INITIAL * torch.randn(tokens, width))

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """The layer's output, with prompts."""
        return self.insert(self.base_layer(x, *more, **options))

    def insert(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T + tokens, d]."""
        prompts = self.network(torch.zeros_like(x[:, :1]) + self.prompts)  # [B, tokens, d]
        return torch.cat([x[:, :1], prompts, x[:, 1:]], 1)


class PromptBefore(PromptBehind):
    """[B, T, d] -> what a layer makes of T + tokens."""

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """The layer on its input, with prompts."""
        return self.base_layer(self.insert(x), *more, **options)
