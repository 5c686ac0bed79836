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
from torch import Tensor, nn

from fedbench.core.options import ConfigError, Count, require
from fedbench.models._backbone import read_state
from fedbench.models._vision_language import (
    INITIAL,
    MLP_RATIO,
    PAD,
    Block,
    ImageEmbedding,
    TextEmbedding,
    fill,
    head_of,
    interpolated,
    shapes_of,
)

EPS = 1e-12  # of the layer norms, as in transformers


class ViLT(nn.Module):
    """{"image": float [B, channels, H, W], "text": int64 [B, T]} -> [B, C].

    Args:
        patch: Side of a patch in pixels.
        width: Size of a token.
        depth: Number of blocks.
        vocab: Number of tokens; 0 is padding.
        channels: Input channels of the patch convolution.  A grey image is repeated in all of them.  None: the data's.
        head: linear, or mlp with one hidden layer of twice the width.
        weights: A folder with config.json and model.safetensors (or pytorch_model.bin) of a ViLT of transformers, or a
            file of fedbench export.  None: random weights.
    """

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        patch: Count = 8,
        width: Count = 32,
        depth: Count = 2,
        heads: Count = 4,
        vocab: Count = 64,
        channels: Count | None = None,
        head: Literal["linear", "mlp"] = "linear",
        weights: str | None = None,
    ):
        super().__init__()
        self.tokens, shown, self.grid = shapes_of(input_shape, patch, "vilt")
        channels = shown if channels is None else channels
        require(
            shown in (1, channels),
            f"model.channels={channels}, but the data set's images have {shown} channels",
        )
        require(width % heads == 0, f"model.heads={heads} must divide model.width={width}")
        self.heads, rows, cols = heads, *self.grid
        self.text = TextEmbedding(vocab, self.tokens, width, EPS)
        self.image = ImageEmbedding(channels, channels // shown, rows * cols, patch, width)
        self.text_modality = nn.Parameter(INITIAL * torch.randn(width))
        self.image_modality = nn.Parameter(INITIAL * torch.randn(width))
        self.blocks = nn.ModuleList(Block(width, heads, MLP_RATIO * width, EPS) for _ in range(depth))
        self.norm, self.pooler = nn.LayerNorm(width, eps=EPS), nn.Linear(width, width)
        self.head = head_of(head, width, num_classes)
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
        for name, fitted in (("text", lambda t: t[: self.tokens]), ("image", lambda t: interpolated(t, self.grid))):
            if f"{name}.position" in stored:
                stored[f"{name}.position"] = fitted(stored[f"{name}.position"])
        fill(self, stored, path, "ViLT")

    def _of_transformers(self, folder: Path) -> dict[str, Tensor]:
        """A ViLT of transformers by this module's names."""
        config = _config(folder)
        heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
        require(
            (heads, layers) == (self.heads, len(self.blocks)),
            f"model.weights={folder} has {layers} blocks of {heads} heads, not model.depth={len(self.blocks)} of "
            f"model.heads={self.heads}",
        )
        return _own_names(read_state(next(folder / name for name in WEIGHTS if (folder / name).is_file())))


WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first existing file is read


def _config(folder: Path) -> dict[str, Any]:
    for names in (("config.json",), WEIGHTS):
        there = any((folder / name).is_file() for name in names)
        require(there, f"model.weights={folder}: there is no {' or '.join(names)} in it")
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
