"""Prompt tuning: trained tokens are inserted into the input of a frozen transformer.

Jia et al., ECCV 2022 (before the first block).  FedDAT's code (AAAI 2024) runs PromptFL on ViLT with prompts for text
and for image.  They follow the first token of each, with its modality embedding but without a position embedding.
Departs from that code: each adapted layer has its own network (reparam), where that code shares one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.adapters.base import Adapter, inputs_of
from fedbench.core.options import Count

INITIAL = 0.02  # initial standard deviation, as of BERT's embeddings
HIDDEN = 192  # hidden units of the network of reparam


class Prompt(Adapter):
    """Adapter that inserts trained tokens after the first token.

    The width d of the tokens is the last dimension of the layer's last parameter.

    Args:
        places: Patterns of layer names.
        tokens: Number of trained tokens in each adapted layer.
        tap: Whether they are inserted into the layer's output or input.  # [B, T, d]
        reparam: Whether a small network computes the tokens from trained embeddings.
        train: Patterns of parameters that are trained besides the tokens.
    """

    neutral = False  # other tokens attend to the new ones

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
        """Return a module that inserts prompts into the output or input of a layer.

        Args:
            layer: The layer.
            name: Unused.

        Returns:
            The module.  None: the layer has no parameters, or it also takes a mask, which would not cover the inserted
            tokens.
        """
        parameters = list(layer.parameters())
        # inputs_of: the number of tensors that forward takes
        if not parameters or isinstance(layer, nn.ModuleList) or inputs_of(layer) != 1:
            return None
        # The last parameter is a bias or weight whose last axis has the width of the tokens.
        width, network = parameters[-1].shape[-1], nn.Sequential()  # an empty network is the identity
        if self.reparam:  # prompts are the outputs of a small network for trained inputs
            # HIDDEN: number of hidden units
            network = nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, width))
        # tap: the option that says whether prompts are inserted into the output or the input
        return (PromptBehind if self.tap == "output" else PromptBefore)(layer, self.tokens, width, network)


class PromptBehind(nn.Module):
    """A layer whose output has prompts after the first token, [B, ...] -> [B, T + tokens, d]."""

    def __init__(self, layer: nn.Module, tokens: int, width: int, network: nn.Module):
        super().__init__()
        self.base_layer, self.network = layer, network
        self.prompts = nn.Parameter(INITIAL * torch.randn(tokens, width))

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """Return the output of the original layer with prompts inserted after the first token, [B, T + tokens, d].

        Args:
            x: Input of the layer.
            *more: Further inputs of the layer.
            **options: Keyword options of the layer.
        """
        return self.insert(self.base_layer(x, *more, **options))

    def insert(self, x: Tensor) -> Tensor:
        """Return tokens x [B, T, d] with the prompts after the first token of each sample.  # [B, T + tokens, d]"""
        prompts = self.network(torch.zeros_like(x[:, :1]) + self.prompts)  # [B, tokens, d]
        return torch.cat([x[:, :1], prompts, x[:, 1:]], 1)


class PromptBefore(PromptBehind):
    """A layer whose input [B, T, d] has prompts inserted after the first token."""

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """Return the output of the original layer for x [B, T, d] with prompts inserted after the first token.

        Args:
            x: Tokens, [B, T, d].
            *more: Further inputs of the layer.
            **options: Keyword options of the layer.
        """
        return self.base_layer(self.insert(x), *more, **options)
