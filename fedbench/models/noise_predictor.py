"""A small U-Net that tells noise from a picture, given how noisy it is and its class (task=denoising).

Ho et al., NeurIPS 2020, much smaller: two halvings, one residual block a level, no attention; class and time are added
as embeddings in every block.  28x28 grey of two classes at width 16: 110,017 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require

GROUPS = 8


class Block(nn.Module):
    """Residual: two 3x3 convolutions, each behind a group norm and SiLU, the embedding [B, E] added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int):
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.told = nn.Linear(embedding, outputs)
        self.after = nn.Sequential(nn.GroupNorm(GROUPS, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x [B, inputs, H, W], embedding [B, E].  # [B, outputs, H, W]"""
        return self.skip(x) + self.after(self.before(x) + self.told(embedding)[:, :, None, None])


class NoisePredictor(nn.Module):
    """{"image": noisy pictures [B, C, H, W], "step": [B] from 0, "label": one-hot [B, classes]} -> what the task asks
    of each number of a picture, [B, C, H, W].

    width: channels of the first level, twice as many below; a multiple of 8.  Sides must be multiples of 4.
    """

    def __init__(self, input_shape: Any, width: Count = 16):
        super().__init__()
        told = isinstance(input_shape, Mapping) and input_shape.keys() == {"image", "step", "label"}
        require(
            told,
            "model=noise_predictor reads noisy pictures, their steps and their classes, which task=denoising makes of "
            f"pictures; it was given {dict(input_shape) if isinstance(input_shape, Mapping) else tuple(input_shape)}",
        )
        channels, *sides = input_shape["image"]
        require(
            all(side % 4 == 0 for side in sides),
            f"model=noise_predictor halves pictures twice: it needs sides that 4 divides, the data set's are {sides}",
        )
        require(width % GROUPS == 0, f"model.width must be a multiple of {GROUPS}, got {width}")
        w, e = width, 4 * width
        self.width = w
        self.time = nn.Sequential(nn.Linear(w, e), nn.SiLU(), nn.Linear(e, e))
        self.label = nn.Linear(input_shape["label"][0], e, bias=False)
        self.first = nn.Conv2d(channels, w, 3, padding=1)
        self.down1, self.to_half = Block(w, w, e), nn.Conv2d(w, 2 * w, 3, 2, 1)
        self.down2, self.to_quarter = Block(2 * w, 2 * w, e), nn.Conv2d(2 * w, 2 * w, 3, 2, 1)
        self.middle = Block(2 * w, 2 * w, e)
        self.up = nn.Upsample(scale_factor=2)
        self.up2, self.up1 = Block(4 * w, 2 * w, e), Block(3 * w, w, e)
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, w), nn.SiLU(), nn.Conv2d(w, channels, 3, padding=1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        """[B, C, H, W]."""
        told = nn.functional.silu(self.time(waves(x["step"], self.width)) + self.label(x["label"]))  # [B, E]
        a = self.down1(self.first(x["image"]), told)
        b = self.down2(self.to_half(a), told)
        y = self.middle(self.to_quarter(b), told)
        y = self.up2(torch.cat([self.up(y), b], 1), told)
        y = self.up1(torch.cat([self.up(y), a], 1), told)
        return self.last(y)


def waves(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of the step t [B], of width/2 wavelengths, 2 pi 10,000^(2 i / width).  # [B, width]"""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
