"""Layers and options that models of pictures with texts share (ViLT, ALBEF), and how their weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import require

PAD = 0  # the token behind a text's end, which nothing attends to
MLP_RATIO = 4  # hidden size of a block's mlp, in multiples of the width
INITIAL = 0.02  # standard deviation of tables, as in BERT
Interpolation = Literal["bilinear", "bicubic"]


class TextEmbedding(nn.Module):
    """Tokens int64 [B, T] -> [B, T, width]: word + position + segment, normalized.  BERT's second segment is unused."""

    def __init__(self, vocab: int, tokens: int, width: int, eps: float):
        super().__init__()
        self.word, self.segment = nn.Embedding(vocab, width), nn.Embedding(2, width)
        self.position = nn.Parameter(INITIAL * torch.randn(tokens, width))
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Every token is of the segment 0."""
        return self.norm(self.word(tokens) + self.segment(torch.zeros_like(tokens)) + self.position)


class ImageEmbedding(nn.Module):
    """[B, channels, H, W] -> [B, 1 + patches, width]: the class token, then the patches.

    copies: how often a grey image is shown, once for each channel that the convolution reads.
    """

    def __init__(self, channels: int, copies: int, patches: int, patch: int, width: int):
        super().__init__()
        self.copies, self.patches = copies, nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(INITIAL * torch.randn(1 + patches, width))

    def forward(self, x: Tensor) -> Tensor:
        """Position embeddings are added, the class token's too."""
        x = torch.cat([x] * self.copies, 1) if self.copies > 1 else x
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [B, patches, width]
        first = torch.zeros_like(patches[:, :1]) + self.class_token
        return torch.cat([first, patches], 1) + self.position


class Attention(nn.Module):
    """[B, T, width] -> [B, T, width]: every token attends to those that are visible [B, 1, 1, T]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (heads, width // heads)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, of all heads side by side."""
        return self.attended(x, x, visible)

    def attended(self, x: Tensor, source: Tensor, *visible: Any) -> Tensor:
        """Queries of x [B, T, width], keys and values of a source [B, S, width]; visible: at most one mask."""
        read = ((self.query, x), (self.key, source), (self.value, source))
        q, k, v = (layer(t).unflatten(-1, self.split).transpose(-2, -3) for layer, t in read)  # [B, heads, T or S, d]
        return self.proj(F.scaled_dot_product_attention(q, k, v, *visible).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  ffn: the second norm and the mlp, which reads x itself."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float):
        super().__init__()
        self.norm, self.attn, self.ffn = nn.LayerNorm(width, eps=eps), Attention(width, heads), nn.Sequential()
        self.ffn.add_module("norm", nn.LayerNorm(width, eps=eps))
        self.ffn.add_module("mlp", nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Tokens [B, T, width]."""
        x = x + self.attn(self.norm(x), visible)
        return x + self.ffn(x)


def shapes_of(input_shape: Any, patch: int, model: str) -> tuple[int, int, tuple[int, int]]:
    """Text tokens, the images' channels, and patches (down, across); ConfigError for other inputs."""
    fits = isinstance(input_shape, Mapping) and {"image", "text"} <= input_shape.keys()
    fits = fits and len(input_shape["image"]) == 3 and len(input_shape["text"]) == 1
    require(
        fits,
        f"model={model} needs images and texts by name, image [channels, height, width] and text [tokens], but the "
        f"data set gives {dict(input_shape) if isinstance(input_shape, Mapping) else tuple(input_shape)}",
    )
    (tokens,), (channels, height, across) = input_shape["text"], input_shape["image"]
    require(
        height % patch == 0 and across % patch == 0,
        f"model.patch={patch} must divide the height {height} and the width {across} of the images",
    )
    return tokens, channels, (height // patch, across // patch)


def head_of(kind: Literal["linear", "mlp"], width: int, num_classes: int) -> nn.Module:
    """One linear layer, or (FedDAT's) one hidden layer of twice the width, its norm and GELU."""
    if kind == "linear":
        return nn.Linear(width, num_classes)
    hidden = 2 * width
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, num_classes))


def interpolated(position: Tensor, grid: tuple[int, int], mode: Interpolation = "bilinear") -> Tensor:
    """Position embeddings [1 + n * n, width] of the class token and a square grid, for another grid: bilinearly from
    corner to corner (ViLT), or bicubically from edge to edge (ALBEF)."""
    first, of_patches = position[:1], position[1:]
    side = round(len(of_patches) ** 0.5)
    if side * side != len(of_patches) or (side, side) == grid:
        return position
    square = of_patches.T.unflatten(1, (side, side))[None]  # [1, width, n, n]
    square = F.interpolate(square, grid, mode=mode, align_corners=mode == "bilinear")
    return torch.cat([first, square[0].flatten(1).T])


def fill(model: nn.Module, stored: Mapping[str, Tensor], path: Path, kind: str) -> None:
    """Put what is stored by a model's own names into all of it but the head; ConfigError where it is not of this model.

    kind: what it should be, in a sentence.  Tables of positions must have the model's sizes already.
    """
    own = {name: p for name, p in model.named_parameters() if not name.startswith("head.")}
    missing = [name for name in own if name not in stored]
    require(not missing, f"model.weights={path} is no {kind}: it lacks {', '.join(missing[:3])}")
    more = [name for name in stored if name not in own and not name.startswith("head.")]
    require(not more, f"model.weights={path} is of a larger model: it has {', '.join(more[:3])}, too")
    for name, p in own.items():
        require(
            stored[name].shape == p.shape,
            f"model.weights={path} does not fit: {name} is {tuple(stored[name].shape)} there, and "
            f"{tuple(p.shape)} by the model's options and the data set",
        )
        p.data.copy_(stored[name])
