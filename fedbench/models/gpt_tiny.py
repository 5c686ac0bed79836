"""A small GPT-2: a causal transformer that predicts the next token at every position of a text.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019: pre-norm blocks, learned positions, the
embedding of tokens tied to the output layer, and GPT-2's initialization.
Departs from GPT-2: dropout is 0 by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import Count, UnitInterval, require
from fedbench.models._backbone import load_file
from fedbench.models._texts import text_length

INITIAL_STD = 0.02  # of GPT-2's weights


class CausalAttention(nn.Module):
    """Self-attention in which a token attends to itself and to earlier tokens.  [B, T, width] -> [B, T, width]."""

    def __init__(self, length: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.split = (3 * heads, width // heads)  # queries, keys and values of each head
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)  # [T, T], row: the token that attends
        mask = torch.zeros(length, length).masked_fill(is_later, float("-inf"))
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return softmax(q k^T / sqrt(d) + mask) v of all heads, concatenated and projected, [B, T, width] as tokens x.

        mask is -inf for later tokens.
        """
        q, k, v = self.qkv(x).unflatten(-1, self.split).transpose(-2, -3).chunk(3, -3)  # [B, heads, T, d] each
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.split[1]) + self.mask  # [B, heads, T, T]
        attended = self.dropout(scores.softmax(-1)) @ v  # [B, heads, T, d]
        return self.proj(attended.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)), with dropout of both summands."""

    def __init__(self, length: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = CausalAttention(length, width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [B, T, width] of the block for tokens x [B, T, width]."""
        x = x + self.dropout1(self.attn(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class GPTTiny(nn.Module):
    """{"text": int64 [B, T]} -> logits [B, T, C] of the next token at each position.

    Args:
        width: Size of the embedding of a token.
        depth: Number of blocks.
        heads: Attention heads.
        dropout: Probability of dropout of embeddings, attention weights and outputs of blocks; GPT-2's is 0.1.
        weights: A file of `fedbench export`.  None: random weights.
    """

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        width: Count = 64,
        depth: Count = 2,
        heads: Count = 4,
        dropout: UnitInterval = 0.0,
        weights: str | None = None,
    ):
        super().__init__()
        length = text_length(input_shape, "model=gpt_tiny")
        require(
            width % heads == 0,
            f"model.heads={heads} must divide model.width={width}: set model.heads to a divisor, such as 1, or "
            "model.width to a multiple",
        )
        self.position = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(length, width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)  # its weight is also the embedding of tokens
        self._initialize()
        load_file(weights, with_head=True)(self)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draw GPT-2's initial weights: normal with standard deviation 0.02.

        In the last layers of attention and mlp, it is 0.02 / sqrt(2 depth).  Biases become 0.
        """
        nn.init.normal_(self.position, std=INITIAL_STD)
        residual_std = INITIAL_STD / math.sqrt(2 * len(self.blocks))  # each block adds to the stream twice
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear):
                is_residual = name.endswith(("attn.proj", "mlp.2"))  # the last layers of attention and mlp
                nn.init.normal_(layer.weight, std=residual_std if is_residual else INITIAL_STD)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the next token at each position, which do not depend on later tokens.

        Args:
            inputs: {"text": int64 token ids [B, T]}, where T is the length of the data set's texts.

        Returns:
            Logits.  # [B, T, C]
        """
        tokens = F.embedding(inputs["text"], self.head.weight) + self.position  # [B, T, width]
        return self.head(self.norm(self.blocks(self.dropout(tokens))))
