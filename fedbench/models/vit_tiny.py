"""A small vision transformer: patches, pre-norm blocks, the mean of all tokens.

Dosovitskiy et al., ICLR 2021, without their class token: the head reads the mean token, as in Zhai et al., 2022.
Tokens that adapter=prompt adds are in that mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import Count, require


class Attention(nn.Module):
    """[B, T, width] -> [B, T, width]: every token attends to all."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (3 * heads, width // heads)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, of all heads side by side."""
        q, k, v = self.qkv(x).unflatten(-1, self.split).transpose(-2, -3).chunk(3, -3)  # [B, heads, T, d] each
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViTTiny(nn.Module):
    """[B, channels, H, W] -> [B, C].  patch: pixels of a side; width: numbers of a token; depth: blocks; mlp_ratio:
    hidden numbers of a block's mlp for each of the width's."""

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        patch: Count = 4,
        width: Count = 64,
        depth: Count = 4,
        heads: Count = 4,
        mlp_ratio: Count = 2,
    ):
        super().__init__()
        require(
            len(input_shape) == 3,
            f"model=vit_tiny needs images [channels, height, width], but the data set gives {tuple(input_shape)}",
        )
        channels, height, across = input_shape
        require(
            height % patch == 0 and across % patch == 0,
            f"model.patch={patch} must divide the height {height} and the width {across} of the images",
        )
        require(width % heads == 0, f"model.heads={heads} must divide model.width={width}")
        tokens = (height // patch) * (across // patch)
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, mlp_ratio * width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position  # [B, T, width]
        return self.head(self.norm(self.blocks(tokens)).mean(1))
