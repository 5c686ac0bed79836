"""Norms of images by the word that options have for them."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "instance", "none"]


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Of inputs [B, channels, H, W].  group: 8 groups, one a channel where there are fewer, and of numbers that 8 does
    not divide as many as divide both; instance: one a channel."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    by_eight = channels if channels < 8 else math.gcd(8, channels)
    return nn.GroupNorm(by_eight if norm == "group" else channels, channels)
