"""A small U-Net for diffusion models of images (task=denoising): it reads a noisy image, its step and its class.

Ho et al., NeurIPS 2020, much smaller: two halvings, one residual block for each level, no attention.  Embeddings of
class and step are added in every block.  110,017 parameters for grey 28x28 images of two classes at width 16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require

GROUPS = 8  # groups of the normalization layers


def _norm_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return three layers, group normalization, SiLU and a 3x3 convolution, [B, inputs, H, W] -> [B, outputs, H, W]."""
    return nn.Sequential(nn.GroupNorm(GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))


class Block(nn.Module):
    """Residual block of two convolutions.  The embedding [B, E] is added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int):
        super().__init__()
        self.before = _norm_convolution(inputs, outputs)
        self.told = nn.Linear(embedding, outputs)  # projects the embedding
        self.after = _norm_convolution(outputs, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Return the outputs [B, outputs, H, W] of the block.

        Args:
            x: Its inputs.  # [B, inputs, H, W]
            embedding: Embedding of noise step and class.  # [B, E]
        """
        # told: linear layer that maps the embedding to the channels
        return self.skip(x) + self.after(self.before(x) + self.told(embedding)[:, :, None, None])


class NoisePredictor(nn.Module):
    """{"image": [B, C, H, W], "step": [B] from 0, "label": one-hot [B, classes]} -> [B, C, H, W].

    H and W must be multiples of 4.

    Args:
        width: Channels of the first level, a multiple of 8.  The lower levels have twice as many.
    """

    def __init__(self, input_shape: Any, width: Count = 16):
        super().__init__()
        is_named = isinstance(input_shape, Mapping)
        require(
            is_named and input_shape.keys() == {"image", "step", "label"},
            "model=noise_predictor needs noisy images, steps and classes, which task=denoising computes from images, "
            f"but its inputs are {dict(input_shape) if is_named else tuple(input_shape)}: set task=denoising",
        )
        channels, *sides = input_shape["image"]
        require(
            all(side % 4 == 0 for side in sides),
            f"model=noise_predictor halves images twice: it needs sides divisible by 4, but the images have "
            f"{sides}: resize them, for example by dataset.resize=32 if the data set has this option",
        )
        require(
            width % GROUPS == 0,
            f"model.width={width} must be a multiple of {GROUPS}, the groups of its normalization layers: set "
            f"{GROUPS}, {2 * GROUPS} or another multiple",
        )
        w = width
        e = 4 * width  # size of the embedding of step and class
        self.width = w
        self.time = nn.Sequential(nn.Linear(w, e), nn.SiLU(), nn.Linear(e, e))
        self.label = nn.Linear(input_shape["label"][0], e, bias=False)
        self.first = nn.Conv2d(channels, w, 3, padding=1)
        self.down1 = Block(w, w, e)
        self.to_half = nn.Conv2d(w, 2 * w, 3, 2, 1)
        self.down2 = Block(2 * w, 2 * w, e)
        self.to_quarter = nn.Conv2d(2 * w, 2 * w, 3, 2, 1)
        self.middle = Block(2 * w, 2 * w, e)
        self.up = nn.Upsample(scale_factor=2)
        self.up2 = Block(4 * w, 2 * w, e)
        self.up1 = Block(3 * w, w, e)
        self.last = _norm_convolution(w, channels)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        """Return the predicted velocity of each value of noisy images.

        Args:
            x: {"image": [B, C, H, W], "step": [B] from 0, "label": one-hot [B, classes]}.

        Returns:
            Velocities (see task=denoising), [B, C, H, W].
        """
        step = self.time(sinusoidal_embedding(x["step"], self.width))
        embedding = nn.functional.silu(step + self.label(x["label"]))  # [B, E]
        full = self.down1(self.first(x["image"]), embedding)  # at the full resolution
        half = self.down2(self.to_half(full), embedding)  # at half of it
        y = self.middle(self.to_quarter(half), embedding)
        y = self.up2(torch.cat([self.up(y), half], 1), embedding)
        y = self.up1(torch.cat([self.up(y), full], 1), embedding)
        return self.last(y)


def sinusoidal_embedding(t: Tensor, width: int) -> Tensor:
    """Return sines and cosines of steps, as in Vaswani et al., 2017: wavelength i is 2 pi 10,000^(2 i / width).

    Args:
        t: Steps of the diffusion, [B].
        width: Size of the embedding.

    Returns:
        Embeddings, [B, width]: width / 2 sines, then as many cosines.
    """
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
