"""ViLT: one transformer reads the words of a question together with the patches of an image.

Kim et al., ICML 2021, with the layers and sizes of transformers' ViltModel, whose weights fit.  All images have the
same size.  Position embeddings are interpolated to its grid once, and all patches are used in order (transformers
samples patches in random order).  The head reads tanh(pooler(first token)).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.options import ConfigError, Count, require
from fedbench.models._backbone import read_state
from fedbench.models._vision_language import (
    INITIAL_STD,
    MLP_RATIO,
    PAD,
    Block,
    ImageEmbedding,
    TextEmbedding,
    build_head,
    check_inputs,
    interpolate_positions,
    load_weights,
)

EPS = 1e-12  # of layer norms, as in transformers


class ViLT(nn.Module):
    """{"image": float [B, channels, H, W], "text": int64 [B, T]} -> [B, C].

    Args:
        patch: Side of a patch in pixels.
        width: Size of a token.
        depth: Number of blocks.
        heads: Attention heads.
        vocab: Number of tokens; 0 is padding.
        channels: Input channels of the patch convolution.  Grey images are repeated in all of them.  None: those of
            the data set.
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
        sizes = check_inputs("vilt", input_shape, patch, width, heads, channels)
        self.tokens = sizes.tokens
        self.grid = sizes.grid
        self.heads = heads
        self.text = TextEmbedding(vocab, self.tokens, width, EPS)
        self.image = ImageEmbedding(sizes.channels, sizes.copies, math.prod(sizes.grid), patch, width)
        self.text_modality = nn.Parameter(INITIAL_STD * torch.randn(width))
        self.image_modality = nn.Parameter(INITIAL_STD * torch.randn(width))
        self.blocks = nn.ModuleList(Block(width, heads, MLP_RATIO * width, EPS) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.pooler = nn.Linear(width, width)
        self.head = build_head(head, width, num_classes)
        if weights is not None:
            self._load(Path(weights))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the classes.

        Args:
            inputs: {"image": images [B, channels, H, W], "text": int64 token ids [B, T], 0 for padding}.

        Returns:
            Logits.  # [B, C]
        """
        return self.head(self.pooled(inputs))

    def pooled(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return tanh(pooler(first token of the last block)), which `head` reads.  # [B, width]

        Args:
            inputs: {"image": [B, channels, H, W], "text": int64 [B, T]}.
        """
        text = self.text(inputs["text"])
        image = self.image(inputs["image"])
        # An adapter may have inserted tokens after the first one of the text, and into the image.  They are visible, as
        # the first token is: the mask of those of the text may come before it.
        inserted = torch.ones_like(text[:, self.tokens :, 0])
        patches = torch.ones_like(image[:, :, 0])
        visible = torch.cat([inserted, inputs["text"] != PAD, patches], 1) > 0  # [B, number of all tokens]
        x = torch.cat([text + self.text_modality, image + self.image_modality], 1)
        for block in self.blocks:
            x = block(x, visible[:, None, None])
        return torch.tanh(self.pooler(self.norm(x)[:, 0]))

    def _load(self, path: Path) -> None:
        """Load all parameters except the head.

        Args:
            path: A folder of transformers' ViLT, or a file of fedbench export.

        Raises:
            ConfigError: It cannot be read or does not fit.
        """
        stored = read_state(path) if path.is_file() else self._read_folder(path)
        if "text.position" in stored:
            stored["text.position"] = stored["text.position"][: self.tokens]  # the length of the data set's texts
        if "image.position" in stored:  # grid: patches of the data set's images, vertically and horizontally
            stored["image.position"] = interpolate_positions(stored["image.position"], self.grid)
        load_weights(self, stored, path, "ViLT")

    def _read_folder(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors in a folder that transformers wrote for a ViLT, by the names of this module.

        Raises:
            ConfigError: Files are missing, or the ViLT has another number of blocks or heads.
        """
        config = _read_config(folder)
        heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
        require(
            (heads, layers) == (self.heads, len(self.blocks)),
            f"model.weights={folder} has {layers} blocks with {heads} heads, but model.depth={len(self.blocks)} and "
            f"model.heads={self.heads}: set model.depth={layers} and model.heads={heads}",
        )
        # the first file of weights, which `_read_config` has found
        return _rename(read_state(next(folder / name for name in WEIGHT_FILES if (folder / name).is_file())))


WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first existing file is read


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json in a folder of transformers.

    Raises:
        ConfigError: The folder lacks config.json or a file of weights, or config.json cannot be read.
    """
    for names in (("config.json",), WEIGHT_FILES):
        exists = any((folder / name).is_file() for name in names)
        require(
            exists,
            f"model.weights={folder} must be a file, or a folder with {' or '.join(names)}: set the path of a file of "
            "fedbench export, or of a folder that save_pretrained of transformers wrote",
        )
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"model.weights={folder}: config.json cannot be read ({error}). Set a folder that save_pretrained of "
            "transformers wrote, or write it again"
        ) from error


# names in this module: names in transformers' ViltModel
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
# in each block
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


def _rename(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of transformers' ViLT by the names of this module.

    Args:
        stored: The state dict of transformers, with or without the prefix "vilt." and a head.

    Returns:
        Tensors by new name, without those that this module lacks, such as the head.
    """
    tensors = {name.removeprefix("vilt."): t for name, t in stored.items()}
    blocks = {name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}
    names = dict(NAMES)  # from the name here to that of transformers
    for i in blocks:  # IN_BLOCK: the same for the layers of a block
        names |= {f"blocks.{i}.{new}": f"encoder.layer.{i}.{old}" for new, old in IN_BLOCK.items()}
    renamed = {}
    for new, old in names.items():
        for suffix in ("", ".weight", ".bias"):
            if old + suffix in tensors:
                renamed[new + suffix] = tensors[old + suffix]
    for name in {"image.class_token", "image.position"} & renamed.keys():
        renamed[name] = renamed[name].flatten(0, -2).squeeze(0)  # without the axis of a batch of one
    if MODALITIES in tensors:
        renamed["text_modality"], renamed["image_modality"] = tensors[MODALITIES][:2]  # a third is of a second image
    return renamed
