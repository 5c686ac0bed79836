"""ViLT: one transformer reads the words of a question and the patches of an image side by side.

Kim et al., ICML 2021; the layers and numbers of transformers' ViltModel, whose weights fit.  All images have one size,
so that position embeddings are brought to its grid once, and no patch is left out or drawn (transformers draws their
order).  The head reads tanh(pooler(the first token)).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import ConfigError, Count, Positive, require
from fedbench.models._backbone import read_state

PAD = 0  # the token behind a text's end, which nothing attends to
INITIAL = 0.02  # standard deviation of tables, as in BERT


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
        q, k, v = (
            layer(x).unflatten(-1, self.split).transpose(-2, -3)  # [B, heads, T, d]
            for layer in (self.query, self.key, self.value)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v, visible).transpose(-2, -3).flatten(-2))


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


class ViLT(nn.Module):
    """{"image": float [B, channels, H, W], "text": int64 [B, T]} -> [B, C].

    patch: pixels of a side; width: numbers of a token; depth: blocks; mlp_ratio: hidden numbers of a block's mlp for
    each of the width's; vocab: tokens that there are, 0 being padding; channels: that the patch convolution reads, in
    all of which a grey image is shown (null: the data's).  head: linear, or mlp with one hidden layer of twice the
    width.  weights: null for random ones, a folder with config.json and model.safetensors of a ViLT of transformers, or
    a file of fedbench.export.
    """

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        patch: Count = 8,
        width: Count = 32,
        depth: Count = 2,
        heads: Count = 4,
        mlp_ratio: Count = 4,
        vocab: Count = 64,
        channels: Count | None = None,
        eps: Positive = 1e-12,
        head: Literal["linear", "mlp"] = "linear",
        weights: str | None = None,
    ):
        super().__init__()
        self.tokens, shown, self.grid = _shapes(input_shape, patch)
        channels = shown if channels is None else channels
        require(
            shown in (1, channels),
            f"model.channels={channels}, but the data set's images have {shown} channels",
        )
        require(width % heads == 0, f"model.heads={heads} must divide model.width={width}")
        self.heads, rows, cols = heads, *self.grid
        self.text = TextEmbedding(vocab, self.tokens, width, eps)
        self.image = ImageEmbedding(channels, channels // shown, rows * cols, patch, width)
        self.text_modality = nn.Parameter(INITIAL * torch.randn(width))
        self.image_modality = nn.Parameter(INITIAL * torch.randn(width))
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio * width, eps) for _ in range(depth))
        self.norm, self.pooler = nn.LayerNorm(width, eps=eps), nn.Linear(width, width)
        self.head = _head(head, width, num_classes)
        if weights is not None:
            self._load(Path(weights))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.pooled(inputs))

    def pooled(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """tanh(pooler(first token)).  # [B, width]"""
        text, image = self.text(inputs["text"]), self.image(inputs["image"])
        # an adapter may have put tokens behind the text's first one, which is always visible, and into the image
        added, shown = torch.ones_like(text[:, self.tokens :, 0]), torch.ones_like(image[:, :, 0])
        visible = torch.cat([added, inputs["text"] != PAD, shown], 1) > 0  # [B, T]
        x = torch.cat([text + self.text_modality, image + self.image_modality], 1)
        for block in self.blocks:
            x = block(x, visible[:, None, None])
        return torch.tanh(self.pooler(self.norm(x)[:, 0]))

    def _load(self, path: Path) -> None:
        """Everything but the head from a folder or a file; ConfigError where it is not there or not of this model."""
        stored = read_state(path) if path.is_file() else self._of_transformers(path)
        own = {name: p for name, p in self.named_parameters() if not name.startswith("head.")}
        missing = [name for name in own if name not in stored]
        require(not missing, f"model.weights={path} is no ViLT: it lacks {', '.join(missing[:3])}")
        more = [name for name in stored if name not in own and not name.startswith("head.")]
        require(not more, f"model.weights={path} is of a larger model: it has {', '.join(more[:3])}, too")
        stored["text.position"] = stored["text.position"][: self.tokens]
        stored["image.position"] = interpolated(stored["image.position"], self.grid)
        for name, p in own.items():
            require(
                stored[name].shape == p.shape,
                f"model.weights={path} does not fit: {name} is {tuple(stored[name].shape)} there, and "
                f"{tuple(p.shape)} by the model's options and the data set",
            )
            p.data.copy_(stored[name])

    def _of_transformers(self, folder: Path) -> dict[str, Tensor]:
        """A ViLT of transformers by this module's names."""
        config = _config(folder)
        heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
        require(
            (heads, layers) == (self.heads, len(self.blocks)),
            f"model.weights={folder} has {layers} blocks of {heads} heads, not model.depth={len(self.blocks)} of "
            f"model.heads={self.heads}",
        )
        return _own_names(read_state(folder / "model.safetensors"))


def _shapes(input_shape: Any, patch: int) -> tuple[int, int, tuple[int, int]]:
    """Text tokens, the images' channels, and patches (down, across); ConfigError for other inputs."""
    fits = isinstance(input_shape, Mapping) and {"image", "text"} <= input_shape.keys()
    fits = fits and len(input_shape["image"]) == 3 and len(input_shape["text"]) == 1
    require(
        fits,
        "model=vilt needs images and texts by name, image [channels, height, width] and text [tokens], but the data "
        f"set gives {dict(input_shape) if isinstance(input_shape, Mapping) else tuple(input_shape)}",
    )
    (tokens,), (channels, height, across) = input_shape["text"], input_shape["image"]
    require(
        height % patch == 0 and across % patch == 0,
        f"model.patch={patch} must divide the height {height} and the width {across} of the images",
    )
    return tokens, channels, (height // patch, across // patch)


def _head(kind: str, width: int, num_classes: int) -> nn.Module:
    if kind == "linear":
        return nn.Linear(width, num_classes)
    hidden = 2 * width
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, num_classes))


def interpolated(position: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position embeddings [1 + n * n, width] of the class token and a square grid, for another grid, bilinearly."""
    first, of_patches = position[:1], position[1:]
    side = round(len(of_patches) ** 0.5)
    if side * side != len(of_patches) or (side, side) == grid:
        return position
    square = of_patches.T.unflatten(1, (side, side))[None]  # [1, width, n, n]
    square = F.interpolate(square, grid, mode="bilinear", align_corners=True)
    return torch.cat([first, square[0].flatten(1).T])


def _config(folder: Path) -> dict[str, Any]:
    for name in ("config.json", "model.safetensors"):
        require((folder / name).is_file(), f"model.weights={folder}: there is no {name} in it")
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.weights={folder}: config.json cannot be read ({error})") from error


# transformers' names of what stands in a model and in each of its blocks; a table's row by its number behind the name
NAMES = {
    "text.word.weight": "embeddings.text_embeddings.word_embeddings.weight",
    "text.segment.weight": "embeddings.text_embeddings.token_type_embeddings.weight",
    "text.position": "embeddings.text_embeddings.position_embeddings.weight",
    "text.norm": "embeddings.text_embeddings.LayerNorm",
    "image.patches": "embeddings.patch_embeddings.projection",
    "image.class_token": "embeddings.cls_token",
    "image.position": "embeddings.position_embeddings",
    "norm": "layernorm",
    "pooler": "pooler.dense",
}
MODALITIES = "embeddings.token_type_embeddings.weight"  # [2, width]
IN_BLOCK = {
    "norm": "layernorm_before",
    "attn.query": "attention.attention.query",
    "attn.key": "attention.attention.key",
    "attn.value": "attention.attention.value",
    "attn.proj": "attention.output.dense",
    "ffn.norm": "layernorm_after",
    "ffn.mlp.0": "intermediate.dense",
    "ffn.mlp.2": "output.dense",
}


def _own_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of transformers' ViLT, of the bare model or of one with a head, by this module's names."""
    bare = {name.removeprefix("vilt."): t for name, t in stored.items()}
    layers = {name.split(".")[2] for name in bare if name.startswith("encoder.layer.")}
    names = dict(NAMES) | {
        f"blocks.{i}.{own}": f"encoder.layer.{i}.{theirs}" for i in layers for own, theirs in IN_BLOCK.items()
    }
    found = {own: bare[theirs] for own, theirs in names.items() if theirs in bare}
    for own, theirs in names.items():
        kinds = (kind for kind in ("weight", "bias") if f"{theirs}.{kind}" in bare)
        found |= {f"{own}.{kind}": bare[f"{theirs}.{kind}"] for kind in kinds}
    for name in {"image.class_token", "image.position"} & found.keys():
        found[name] = found[name].flatten(0, -2).squeeze(0)  # they have an axis for a batch of one
    if MODALITIES in bare:
        found["text_modality"], found["image_modality"] = bare[MODALITIES][:2]
    return found
