"""ALBEF: an image and a question are read each by itself, then the words look at the patches.

Li et al., NeurIPS 2021; the layers and numbers of its released code.  Image: a vision transformer, norms first, with a
norm at its end.  Text: BERT, norms last, whose blocks from fusion_layer on attend to the image between attention and
mlp.  The head reads the first token behind the last block.
Departs from the code: its VQA answers with a decoder of six further blocks, which ranks the answers' words.  FedPIA
(AAAI 2025) says both "encoder-decoder" and "task-specific linear heads", and has labels of several classes: a head.
"""

from __future__ import annotations

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
    fill,
    head_of,
    interpolated,
    shapes_of,
)

IMAGE_EPS, TEXT_EPS = 1e-6, 1e-12  # of the layer norms, as in timm and BERT


class ImageTower(nn.Module):
    """[B, channels, H, W] -> [B, 1 + patches, width]."""

    def __init__(self, embedding: ImageEmbedding, width: int, depth: int, heads: int, hidden: int):
        super().__init__()
        self.embed = embedding
        self.blocks = nn.ModuleList(Block(width, heads, hidden, IMAGE_EPS) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=IMAGE_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Class token and patches, normalized."""
        x = self.embed(x)
        visible = torch.ones_like(x[:, :, 0]) > 0  # [B, 1 + patches]
        for block in self.blocks:
            x = block(x, visible[:, None, None])
        return self.norm(x)


class CrossAttention(Attention):
    """[B, T, width] and an image [B, S, width] -> [B, T, width]: every word attends to all of the image."""

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, keys and values of the image."""
        return self.attended(x, image)


class TextBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)): BERT's."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attn, self.attn_norm = Attention(width, heads), nn.LayerNorm(width, eps=TEXT_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norm = nn.LayerNorm(width, eps=TEXT_EPS)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Tokens [B, T, width]."""
        x = self.attn_norm(x + self.attn(x, visible))
        return self.norm(x + self.mlp(x))


class FusionBlock(TextBlock):
    """The same, with a look at the image between both."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__(width, heads, hidden)
        self.cross, self.cross_norm = CrossAttention(width, heads), nn.LayerNorm(width, eps=TEXT_EPS)

    def forward(self, x: Tensor, visible: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        """Tokens [B, T, width]."""
        x = self.attn_norm(x + self.attn(x, visible))
        x = self.cross_norm(x + self.cross(x, image))
        return self.norm(x + self.mlp(x))


class ALBEF(nn.Module):
    """{"image": float [B, channels, H, W], "text": int64 [B, T]} -> [B, C].

    Args:
        patch: Side of a patch in pixels.
        width: Size of a token.
        depth: Number of blocks of the image's tower, and of the text's.
        fusion_layer: Number of the text's blocks that see words alone.
        vocab: Number of tokens; 0 is padding.
        channels: Input channels of the patch convolution.  A grey image is repeated in all of them.  None: the data's.
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
        self.tokens, shown, self.grid = shapes_of(input_shape, patch, "albef")
        channels = shown if channels is None else channels
        require(shown in (1, channels), f"model.channels={channels}, but the data set's images have {shown} channels")
        require(width % heads == 0, f"model.heads={heads} must divide model.width={width}")
        require(
            fusion_layer < depth,
            f"model.fusion_layer={fusion_layer} must be below model.depth={depth}: no block would see the image",
        )
        (rows, cols), hidden, self.fusion_layer = self.grid, MLP_RATIO * width, fusion_layer
        embedding = ImageEmbedding(channels, channels // shown, rows * cols, patch, width)
        self.image = ImageTower(embedding, width, depth, heads, hidden)
        self.words = TextEmbedding(vocab, self.tokens, width, TEXT_EPS)
        kinds = [TextBlock] * fusion_layer + [FusionBlock] * (depth - fusion_layer)
        self.blocks = nn.ModuleList(kind(width, heads, hidden) for kind in kinds)
        self.head = head_of(head, width, num_classes)
        if weights is not None:
            self._load(Path(weights))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, C]."""
        return self.head(self.fused(inputs))

    def sublayers(self) -> dict[str, tuple[str, ...]]:
        """Return patterns of layer names for adapters: a block of the text encoder ends in its norm."""
        return {"block": ("image.blocks.*", "blocks.*.norm")}

    def fused(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The first token, which has seen words and patches.  # [B, width]"""
        image, x = self.image(inputs["image"]), self.words(inputs["text"])
        # an adapter may have put tokens behind the text's first one, which is always visible
        visible = torch.cat([torch.ones_like(x[:, self.tokens :, 0]), inputs["text"] != PAD], 1) > 0  # [B, T]
        for number, block in enumerate(self.blocks):
            seen = (visible[:, None, None], image) if number >= self.fusion_layer else (visible[:, None, None],)
            x = block(x, *seen)
        return x[:, 0]

    def _load(self, path: Path) -> None:
        """Everything but the head; ConfigError where it is not there or not of this model."""
        require(path.is_file(), f"model.weights={path}: there is no such file")
        stored: Any = read_state(path)
        released = stored["model"] if isinstance(stored.get("model"), dict) else stored  # beside the optimizer's
        if any(name.startswith("visual_encoder.") for name in released):
            stored = _own_names(released)
        for name, fitted in (
            ("words", lambda t: t[: self.tokens]),
            ("image.embed", lambda t: interpolated(t, self.grid, "bicubic")),
        ):
            if f"{name}.position" in stored:
                stored[f"{name}.position"] = fitted(stored[f"{name}.position"])
        fill(self, stored, path, "ALBEF")


# the released code's names of what stands in a model and in each of its blocks
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


def _own_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the released code by this module's names; momentum copies, queues and other heads are left
    out."""
    found: dict[str, Tensor] = {}
    for name, t in stored.items():
        theirs = name.replace("text_encoder.bert.", "text_encoder.", 1)
        prefix = next((p for p in NAMES if theirs.startswith(p)), None)
        if prefix is not None:
            found |= _in_place(NAMES[prefix], theirs.removeprefix(prefix), t)
    for name, first in (("image.embed.class_token", (0, 0)), ("image.embed.position", 0)):
        if name in found:  # it has axes for a batch of one, and for one token
            found[name] = found[name][first]
    return found


def _in_place(own: str, rest: str, t: Tensor) -> dict[str, Tensor]:
    """A tensor by its own name, of which `own` is the beginning and `rest` what the released code says further."""
    if not own.endswith("blocks."):
        return {own + rest: t}
    number, _, layer = rest.partition(".")
    if layer.startswith("attn.qkv."):
        kind = layer.removeprefix("attn.qkv.")
        return {f"{own}{number}.attn.{n}.{kind}": part for n, part in zip(("query", "key", "value"), t.chunk(3))}
    inside = IN_IMAGE_BLOCK if own.startswith("image") else IN_BLOCK
    place = next((p for p in inside if layer.startswith(f"{p}.")), "")
    return {f"{own}{number}.{inside.get(place, '')}{layer.removeprefix(place)}": t}
