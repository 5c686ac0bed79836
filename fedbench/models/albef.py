"""ALBEF: separate encoders of image and text, and blocks in which words attend to patches.

Li et al., NeurIPS 2021, with the layers and sizes of its released code.  Image: a pre-norm vision transformer with a
final norm.  Text: BERT (post-norm), whose blocks from fusion_layer on attend to the image between attention and mlp.
The head reads the first token after the last block.  Departs from the code: for VQA, it has a decoder of six further
blocks, which ranks answers.  FedPIA (AAAI 2025) mentions both an "encoder-decoder" and "task-specific linear heads",
and has multi-label tasks.  This model has a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, NonNegativeInt, require
from fedbench.models._backbone import read_state
from fedbench.models._vision_language import (
    MLP_RATIO,
    PAD,
    Attention,
    Block,
    ImageEmbedding,
    TextEmbedding,
    build_head,
    check_inputs,
    interpolate_positions,
    load_weights,
)

IMAGE_EPS = 1e-6  # of layer norms, as in timm
TEXT_EPS = 1e-12  # of layer norms, as in BERT


class ImageTower(nn.Module):
    """The image encoder.  [B, channels, H, W] -> [B, 1 + patches, width]."""

    def __init__(self, embedding: ImageEmbedding, width: int, depth: int, heads: int, hidden: int):
        super().__init__()
        self.embed = embedding
        self.blocks = nn.ModuleList(Block(width, heads, hidden, IMAGE_EPS) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=IMAGE_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens of images x [B, channels, H, W] after all blocks and the last layer norm.

        The first one is the class token.  # [B, 1 + patches, width]
        """
        x = self.embed(x)
        visible = torch.ones_like(x[:, :, 0]) > 0  # [B, 1 + patches], all True
        for block in self.blocks:
            x = block(x, visible[:, None, None])
        return self.norm(x)


class CrossAttention(Attention):
    """Attention of words [B, T, width] to an image [B, S, width].  -> [B, T, width]."""

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """Return the attention [B, T, width] of words x [B, T, width] to the tokens of the image [B, S, width].

        It is softmax(q k^T / sqrt(d)) v, with queries of the words, and keys and values of the image.
        """
        return self.attend(x, image)


class TextBlock(nn.Module):
    """Post-norm block of BERT: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attn = Attention(width, heads)
        self.attn_norm = nn.LayerNorm(width, eps=TEXT_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norm = nn.LayerNorm(width, eps=TEXT_EPS)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Return the outputs of the block for the tokens of texts.

        Args:
            x: Embedded tokens.  # [B, T, width]
            visible: False for padding, to which no token attends.  # [B, 1, 1, T] bool

        Returns:
            The outputs.  # [B, T, width]
        """
        x = self.attn_norm(x + self.attn(x, visible))
        return self.norm(x + self.mlp(x))


class FusionBlock(TextBlock):
    """TextBlock with cross-attention to the image between attention and mlp."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__(width, heads, hidden)
        self.cross = CrossAttention(width, heads)
        self.cross_norm = nn.LayerNorm(width, eps=TEXT_EPS)

    def forward(self, x: Tensor, visible: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs [B, T, width] for words that attend to each other and to an image.

        Args:
            x: Words, [B, T, width].
            visible: False for padding, [B, 1, 1, T] bool.
            image: Tokens of the image, [B, S, width].
        """
        x = self.attn_norm(x + self.attn(x, visible))
        x = self.cross_norm(x + self.cross(x, image))
        return self.norm(x + self.mlp(x))


class ALBEF(nn.Module):
    """{"image": float [B, channels, H, W], "text": int64 [B, T]} -> [B, C].

    Args:
        patch: Side of a patch in pixels.
        width: Size of a token.
        depth: Number of blocks of the image encoder, and of the text encoder.
        fusion_layer: Number of text blocks before those that attend to the image.
        heads: Attention heads.
        vocab: Number of tokens; 0 is padding.
        channels: Input channels of the patch convolution.  Grey images are repeated in all of them.  None: those of
            the data set.
        head: linear, or mlp with one hidden layer of twice the width.
        weights: A checkpoint of ALBEF's code (ALBEF.pth), or a file of fedbench export.  None: random weights.
    """

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        patch: Count = 8,
        width: Count = 32,
        depth: Count = 2,
        fusion_layer: NonNegativeInt = 1,
        heads: Count = 4,
        vocab: Count = 64,
        channels: Count | None = None,
        head: Literal["linear", "mlp"] = "linear",
        weights: str | None = None,
    ):
        super().__init__()
        sizes = check_inputs("albef", input_shape, patch, width, heads, channels)
        require(
            fusion_layer < depth,
            f"model.fusion_layer={fusion_layer} must be below model.depth={depth}, because only the blocks from "
            f"fusion_layer on read the image: set model.fusion_layer to at most {depth - 1}",
        )
        self.tokens = sizes.tokens
        self.grid = sizes.grid
        self.fusion_layer = fusion_layer
        hidden = MLP_RATIO * width
        embedding = ImageEmbedding(sizes.channels, sizes.copies, math.prod(sizes.grid), patch, width)
        self.image = ImageTower(embedding, width, depth, heads, hidden)
        self.words = TextEmbedding(vocab, self.tokens, width, TEXT_EPS)
        kinds = [TextBlock] * fusion_layer + [FusionBlock] * (depth - fusion_layer)
        self.blocks = nn.ModuleList(kind(width, heads, hidden) for kind in kinds)
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
        return self.head(self.fused(inputs))

    def sublayers(self) -> dict[str, tuple[str, ...]]:
        """Return {"block": patterns of layer names}: where adapter.places=block adds adapters.

        These are the last layers of the blocks of both towers.
        """
        return {"block": ("image.blocks.*", "blocks.*.norm")}

    def fused(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the last text block at the first token, which `head` reads.  # [B, width]

        Args:
            inputs: {"image": [B, channels, H, W], "text": int64 [B, T]}.
        """
        image = self.image(inputs["image"])
        x = self.words(inputs["text"])
        # An adapter may have inserted tokens after the first one, so that x has more than the self.tokens of the text.
        # They are visible, as the first one is: their part of the mask may come before it.
        inserted = torch.ones_like(x[:, self.tokens :, 0])
        visible = torch.cat([inserted, inputs["text"] != PAD], 1) > 0  # [B, T + inserted ones]
        mask = visible[:, None, None]
        for i, block in enumerate(self.blocks):
            x = block(x, mask, image) if i >= self.fusion_layer else block(x, mask)
        return x[:, 0]

    def _load(self, path: Path) -> None:
        """Load all parameters except the head.

        Args:
            path: A checkpoint of ALBEF's code, or a file of fedbench export.

        Raises:
            ConfigError: The file does not exist, cannot be read or does not fit.
        """
        require(
            path.is_file(),
            f"model.weights={path} {'is a folder' if path.is_dir() else 'does not exist'}: set the path of a file of "
            "weights, or null for random weights",
        )
        stored: Any = read_state(path)
        released = stored["model"] if isinstance(stored.get("model"), dict) else stored  # without the optimizer
        if any(name.startswith("visual_encoder.") for name in released):
            stored = _rename(released)
        if "words.position" in stored:
            stored["words.position"] = stored["words.position"][: self.tokens]  # the length of the data set's texts
        if "image.embed.position" in stored:  # grid: patches of the data set's images, vertically and horizontally
            stored["image.embed.position"] = interpolate_positions(stored["image.embed.position"], self.grid, "bicubic")
        load_weights(self, stored, path, "ALBEF")


# beginnings of names in the released code: names in this module
NAMES = {
    "visual_encoder.cls_token": "image.embed.class_token",
    "visual_encoder.pos_embed": "image.embed.position",
    "visual_encoder.patch_embed.proj.": "image.embed.patches.",
    "visual_encoder.norm.": "image.norm.",
    "visual_encoder.blocks.": "image.blocks.",
    "text_encoder.embeddings.word_embeddings.": "words.word.",
    "text_encoder.embeddings.token_type_embeddings.": "words.segment.",
    "text_encoder.embeddings.position_embeddings.weight": "words.position",
    "text_encoder.embeddings.LayerNorm.": "words.norm.",
    "text_encoder.encoder.layer.": "blocks.",
}
# in each block
IN_IMAGE_BLOCK = {"norm1": "norm", "norm2": "ffn.norm", "mlp.fc1": "ffn.mlp.0", "mlp.fc2": "ffn.mlp.2"}
IN_BLOCK = {
    "attention.self": "attn",
    "attention.output.dense": "attn.proj",
    "attention.output.LayerNorm": "attn_norm",
    "crossattention.self": "cross",
    "crossattention.output.dense": "cross.proj",
    "crossattention.output.LayerNorm": "cross_norm",
    "intermediate.dense": "mlp.0",
    "output.dense": "mlp.2",
    "output.LayerNorm": "norm",
}


def _rename(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the released code by the names of this module.

    Args:
        stored: The state dict of the released code.

    Returns:
        Tensors by new name, without momentum encoders, queues and heads, which this module lacks.
    """
    renamed: dict[str, Tensor] = {}
    for full_name, t in stored.items():
        name = full_name.replace("text_encoder.bert.", "text_encoder.", 1)
        # NAMES: from the beginning of a released name to that of the name here
        prefix = next((p for p in NAMES if name.startswith(p)), None)
        if prefix is not None:
            renamed |= _renamed_tensors(NAMES[prefix], name.removeprefix(prefix), t)
    for name, index in (("image.embed.class_token", (0, 0)), ("image.embed.position", 0)):
        if name in renamed:  # [1, 1, D] -> [D] without the axes of batch and token; [1, M, D] -> [M, D]
            renamed[name] = renamed[name][index]
    return renamed


def _renamed_tensors(new_prefix: str, suffix: str, t: Tensor) -> dict[str, Tensor]:
    """Return a tensor of the released code by its new name, or the three parts of a joint qkv by theirs.

    Args:
        new_prefix: Beginning of the new name, a value of `NAMES`, such as "image.blocks.".
        suffix: The old name without its beginning, such as "0.attn.qkv.weight".
        t: The tensor.

    Returns:
        {new name: tensor}, such as {"image.blocks.0.attn.query.weight": ...} for query, key and value.
    """
    if not new_prefix.endswith("blocks."):
        return {new_prefix + suffix: t}
    block, _, layer = suffix.partition(".")
    if layer.startswith("attn.qkv."):
        parameter = layer.removeprefix("attn.qkv.")  # weight or bias
        thirds = zip(("query", "key", "value"), t.chunk(3))
        return {f"{new_prefix}{block}.attn.{name}.{parameter}": third for name, third in thirds}
    layers = IN_IMAGE_BLOCK if new_prefix.startswith("image") else IN_BLOCK  # from old to new names in a block
    old = next((old for old in layers if layer.startswith(f"{old}.")), "")
    return {f"{new_prefix}{block}.{layers.get(old, '')}{layer.removeprefix(old)}": t}
