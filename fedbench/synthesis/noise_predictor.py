"""A small U-Net that predicts the noise in a picture, given how noisy it is and its class.

Ho et al., NeurIPS 2020, much smaller: two halvings, one residual block a level, no attention; class and time are added
as embeddings in every block.  28x28 grey at width 24: about 0.4 million numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedbench.core.options import require

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
    """width: channels of the first level, twice as many below; a multiple of 8.  Sides must be multiples of 4."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 24):
        super().__init__()
        require(
            len(input_shape) == 3 and all(side % 4 == 0 for side in input_shape[1:]),
            f"the noise predictor needs pictures [channels, height, width] with sides that 4 divides, "
            f"got {tuple(input_shape)}",
        )
        require(width > 0 and width % GROUPS == 0, f"--width must be a multiple of {GROUPS}, got {width}")
        w, e = width, 4 * width
        self.width = w
        self.time = nn.Sequential(nn.Linear(w, e), nn.SiLU(), nn.Linear(e, e))
        self.kind = nn.Embedding(num_classes, e)
        self.first = nn.Conv2d(input_shape[0], w, 3, padding=1)
        self.down1, self.to_half = Block(w, w, e), nn.Conv2d(w, 2 * w, 3, 2, 1)
        self.down2, self.to_quarter = Block(2 * w, 2 * w, e), nn.Conv2d(2 * w, 2 * w, 3, 2, 1)
        self.middle = Block(2 * w, 2 * w, e)
        self.up = nn.Upsample(scale_factor=2)
        self.up2, self.up1 = Block(4 * w, 2 * w, e), Block(3 * w, w, e)
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, w), nn.SiLU(), nn.Conv2d(w, input_shape[0], 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        """Noisy pictures x [B, C, H, W], steps t [B] and classes [B], int64: the noise.  # [B, C, H, W]"""
        told = nn.functional.silu(self.time(waves(t, self.width)) + self.kind(label))
        a = self.down1(self.first(x), told)
        b = self.down2(self.to_half(a), told)
        y = self.middle(self.to_quarter(b), told)
        y = self.up2(torch.cat([self.up(y), b], 1), told)
        y = self.up1(torch.cat([self.up(y), a], 1), told)
        return self.last(y)


def waves(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of the step t [B], of width/2 wavelengths from 2 pi to 20,000 pi.  # [B, width]"""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
