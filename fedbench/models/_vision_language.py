"""Layers, options and weight loading that models of images and texts share (ViLT, ALBEF)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.core.options import require

PAD = 0  # the padding token, which no token attends to
MLP_RATIO = 4  # hidden width of the mlp of a block, in multiples of width
INITIAL_STD = 0.02  # standard deviation of embedding tables, as in BERT


class TextEmbedding(nn.Module):
    """Sum of word, position and segment embeddings, normalized.  Tokens int64 [B, T] -> [B, T, width].

    All tokens have segment 0 of BERT.
    """

    def __init__(self, vocab: int, tokens: int, width: int, eps: float):
        super().__init__()
        self.word = nn.Embedding(vocab, width)
        self.segment = nn.Embedding(2, width)
        self.position = nn.Parameter(INITIAL_STD * torch.randn(tokens, width))
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [B, T, width] of token ids [B, T] int64; T must be the number of positions."""
        return self.norm(self.word(tokens) + self.segment(torch.zeros_like(tokens)) + self.position)


class ImageEmbedding(nn.Module):
    """Class token and patches, with position embeddings.  [B, channels, H, W] -> [B, 1 + patches, width].

    Args:
        channels: Input channels of the patch convolution.
        copies: How often the image is repeated along the channels.
        patches: Number of patches.
        patch: Side of a patch in pixels.
        width: Size of a token.
    """

    def __init__(self, channels: int, copies: int, patches: int, patch: int, width: int):
        super().__init__()
        self.copies = copies
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(INITIAL_STD * torch.randn(1 + patches, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedded tokens of images x [B, channels, H, W]: the class token, then the patches.

        # [B, 1 + patches, width]
        """
        x = torch.cat([x] * self.copies, 1) if self.copies > 1 else x  # grey images as colour images
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [B, patches, width]
        class_token = torch.zeros_like(patches[:, :1]) + self.class_token
        return torch.cat([class_token, patches], 1) + self.position


class Attention(nn.Module):
    """Self-attention to the tokens where visible [B, 1, 1, T] is True.  [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.split = (heads, width // heads)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Return the self-attention of tokens x [B, T, width] to those where visible [B, 1, 1, T] is True.

        Returns:
            softmax(q k^T / sqrt(d)) v of all heads, concatenated and projected.  # [B, T, width]
        """
        return self.attend(x, x, visible)

    def attend(self, x: Tensor, source: Tensor, *visible: Any) -> Tensor:
        """Return the attention of tokens to the tokens of another sequence.

        Args:
            x: Tokens that attend.  # [B, T, width]
            source: Tokens to which they attend.  # [B, S, width]
            *visible: One mask of the tokens of source, or no argument if all are visible: a traced graph (torch.fx)
                computes attention for several clients only if all its arguments are tensors.  # [B, 1, 1, S] bool

        Returns:
            softmax(q k^T / sqrt(d)) v of all heads, concatenated and projected.  # [B, T, width]
        """
        inputs = ((self.query, x), (self.key, source), (self.value, source))
        # self.split is (heads, d)  [B, heads, T or S, d] each
        q, k, v = (layer(t).unflatten(-1, self.split).transpose(-2, -3) for layer, t in inputs)
        return self.proj(F.scaled_dot_product_attention(q, k, v, *visible).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    `ffn` is the second norm together with the mlp.
    """

    def __init__(self, width: int, heads: int, hidden: int, eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.ffn = nn.Sequential()
        self.ffn.add_module("norm", nn.LayerNorm(width, eps=eps))
        self.ffn.add_module("mlp", nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Return the outputs [B, T, width] for tokens x [B, T, width]; only tokens with visible True are attended to.

        Args:
            x: Tokens, [B, T, width].
            visible: Mask of the tokens, [B, 1, 1, T] bool.
        """
        x = x + self.attn(self.norm(x), visible)
        return x + self.ffn(x)  # ffn: the second norm, then the mlp


class InputSizes(NamedTuple):
    """Sizes of the inputs of a model.

    Attributes:
        tokens: Number of text tokens.
        channels: Input channels of the patch convolution.
        copies: How often the data set's images are repeated along the channels.
        grid: Number of patches, vertically and horizontally.
    """

    tokens: int
    channels: int
    copies: int
    grid: tuple[int, int]


def check_inputs(model: str, input_shape: Any, patch: int, width: int, heads: int, channels: int | None) -> InputSizes:
    """Check the options of a model against the inputs of the data set.

    Args:
        model: Option of conf/model, for messages.
        input_shape: Shapes of the inputs by name.
        patch: Side of a patch in pixels.
        width: Size of a token.
        heads: Attention heads.
        channels: Input channels of the patch convolution.  None: those of the images.

    Returns:
        Sizes by which the model's layers are built.

    Raises:
        ConfigError: The inputs are not an image and a text, or an option does not fit them.
    """
    is_named = isinstance(input_shape, Mapping)
    require(
        is_named
        and {"image", "text"} <= input_shape.keys()
        and len(input_shape["image"]) == 3
        and len(input_shape["text"]) == 1,
        f"model={model} needs images and texts by name, image [channels, height, width] and text [tokens], but the "
        f"data set gives {dict(input_shape) if is_named else tuple(input_shape)}: choose a data set with image and "
        "text, such as dataset=synthetic_medvqa",
    )
    data_channels, rows, cols = input_shape["image"]
    require(
        rows % patch == 0 and cols % patch == 0,
        f"model.patch={patch} must divide the height {rows} and the width {cols} of the images: set a common divisor "
        "of both",
    )
    input_channels: int = data_channels if channels is None else channels
    require(
        data_channels in (1, input_channels),
        f"model.channels={channels}, but the data set's images have {data_channels} channels: set model.channels=null, "
        f"which uses {data_channels}",
    )
    require(
        width % heads == 0,
        f"model.heads={heads} must divide model.width={width}: set model.heads to a divisor, such as 1, or model.width "
        "to a multiple",
    )
    return InputSizes(
        tokens=input_shape["text"][0],
        channels=input_channels,
        copies=input_channels // data_channels,
        grid=(rows // patch, cols // patch),
    )


def build_head(kind: Literal["linear", "mlp"], width: int, num_classes: int) -> nn.Module:
    """Return the head of a model, [B, width] -> [B, num_classes].

    Args:
        kind: "linear", a linear layer; "mlp", as in FedDAT's code: a hidden layer of twice the width, layer norm, GELU
            and a linear layer.
        width: Number of inputs.
        num_classes: Number of outputs.
    """
    if kind == "linear":
        return nn.Linear(width, num_classes)
    hidden = 2 * width
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, num_classes))


def interpolate_positions(
    position: Tensor, grid: tuple[int, int], mode: Literal["bilinear", "bicubic"] = "bilinear"
) -> Tensor:
    """Interpolate position embeddings of a square grid of patches to another grid.

    Args:
        position: Embeddings of the class token and m patches, of an n x n grid if m = n * n.  # [1 + m, width]
        grid: Number (rows, cols) of patches, vertically and horizontally.
        mode: "bilinear" with aligned corners, as in ViLT, or "bicubic" without aligned corners, as in ALBEF.

    Returns:
        Embeddings of the class token and the patches of the grid, [1 + rows * cols, width].  `position` itself if the
        grid is the same, or if m is no square number; in this case m may differ from rows * cols.
    """
    class_token, patches = position[:1], position[1:]
    side = round(len(patches) ** 0.5)
    if side * side != len(patches) or (side, side) == grid:
        return position
    square = patches.T.unflatten(1, (side, side))[None]  # [1, width, n, n]
    square = F.interpolate(square, grid, mode=mode, align_corners=mode == "bilinear")
    return torch.cat([class_token, square[0].flatten(1).T])


def load_weights(model: nn.Module, stored: Mapping[str, Tensor], path: Path, kind: str) -> None:
    """Load all parameters of a model except the head.

    Tables of position embeddings must already have the model's size (`interpolate_positions`).

    Args:
        model: The model.
        stored: Tensors by parameter name.
        path: Their file, the value of model.weights.
        kind: Name of the model, for messages.

    Raises:
        ConfigError: The tensors are not those of the model.
    """
    parameters = {name: p for name, p in model.named_parameters() if not name.startswith("head.")}
    missing = [name for name in parameters if name not in stored]
    require(
        not missing,
        f"model.weights={path} is not of this {kind}: it lacks {', '.join(missing[:3])}. Set the options of model to "
        "those of the model in the file",
    )
    unused = [name for name in stored if name not in parameters and not name.startswith("head.")]
    require(
        not unused,
        f"model.weights={path} is of a larger {kind}: it also has {', '.join(unused[:3])}. Set the options of model to "
        "those of the model in the file",
    )
    for name, p in parameters.items():
        require(
            stored[name].shape == p.shape,
            f"model.weights={path} does not fit: {name} has shape {tuple(stored[name].shape)} in the file, but "
            f"{tuple(p.shape)} in the model. Set the options of model to those of the model in the file, or use a file "
            "that fits",
        )
        p.data.copy_(stored[name])
