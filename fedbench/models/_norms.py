"""Normalization layers of images by the value of the option `norm`."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "instance", "none"]


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Return a normalization layer for inputs [B, channels, H, W].

    Args:
        norm: "batch"; "instance", one group per channel; "none", the identity; or "group".  "group" has 8 groups, or
            gcd(8, channels) if 8 does not divide channels, and one group per channel below 8 channels.
        channels: Number of channels.
    """
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    groups = math.gcd(8, channels) if norm == "group" and channels >= 8 else channels
    return nn.GroupNorm(groups, channels)
