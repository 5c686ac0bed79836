"""A small vision transformer: patches, pre-norm blocks, and a head on the mean of all tokens.

Dosovitskiy et al., ICLR 2021, without the class token: the head reads the mean token, as in Zhai et al., 2022.
The mean includes tokens that adapter=prompt adds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import Count, require
from fedbench.models._backbone import load_file


class Attention(nn.Module):
    """Self-attention.  [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (3 * heads, width // heads)  # queries, keys and values of each head
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return multi-head self-attention of tokens x [B, T, width], after the output projection.  # [B, T, width]"""
        q, k, v = self.qkv(x).unflatten(-1, self.split).transpose(-2, -3).chunk(3, -3)  # [B, heads, T, d] each
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [B, T, width] of the block for tokens x [B, T, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViTTiny(nn.Module):
    """[B, channels, H, W] -> [B, C].

    Args:
        patch: Side of a patch in pixels.
        width: Size of a token.
        depth: Number of blocks.
        heads: Attention heads.
        mlp_ratio: Hidden width of the mlp of a block, in multiples of width.
        weights: A file of `fedbench export`, whose head is ignored.  None: random weights.
    """

    def __init__(
        self,
        input_shape: tuple,
        num_classes: int,
        patch: Count = 4,
        width: Count = 64,
        depth: Count = 4,
        heads: Count = 4,
        mlp_ratio: Count = 2,
        weights: str | None = None,
    ):
        super().__init__()
        require(
            len(input_shape) == 3,
            f"model=vit_tiny needs images [channels, height, width], but the data set gives {tuple(input_shape)}: "
            "choose a data set of images, or another model",
        )
        channels, rows, cols = input_shape
        require(
            rows % patch == 0 and cols % patch == 0,
            f"model.patch={patch} must divide the height {rows} and the width {cols} of the images: set a common "
            "divisor of both",
        )
        require(
            width % heads == 0,
            f"model.heads={heads} must divide model.width={width}: set model.heads to a divisor, such as 1, or "
            "model.width to a multiple",
        )
        tokens = (rows // patch) * (cols // patch)
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, mlp_ratio * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        load_file(weights)(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for images x [B, channels, H, W]."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position  # [B, T, width]
        return self.head(self.norm(self.blocks(tokens)).mean(1))
