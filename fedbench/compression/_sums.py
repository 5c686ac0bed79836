"""Sums in a fixed order, which are equal bit for bit on every device.

The rounding of torch.sum may depend on other rows, threads and the device.  Encodings must not depend on these, because
sender and receiver are different machines.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total(values: Tensor, dim: int = 1) -> Tensor:
    """Return the sum of values over the dimension dim of size >= 1, without this dimension.

    The second half of the dimension is added to its first until one entry is left.  So the order of additions is fixed,
    and the rounding error grows with log2 of the size only.
    """
    while (count := values.shape[dim]) > 1:
        half = (count + 1) // 2
        values, rest = values.narrow(dim, 0, half).clone(), values.narrow(dim, half, count - half)
        values.narrow(dim, 0, count - half).add_(rest)
    return values.squeeze(dim)


def l2_norm(values: Tensor) -> Tensor:
    """Return the l2 norms of rows [k, n], computed in float64; never below the largest magnitude.  # [k, 1] float32"""
    return total(values.double().square())[:, None].sqrt().float()


def mean_magnitude(values: Tensor) -> Tensor:
    """Return mean |x| of rows [k, n].  # [k, 1] float32"""
    return divided(total(values.double().abs())[:, None], values.shape[1]).float()


def divided(values: Tensor, by: float) -> Tensor:
    """Return values / by, rounded once.  A GPU would multiply by the rounded reciprocal of a Python number."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def over(values: Tensor, scale: Tensor) -> Tensor:
    """Return |values| / scale for values [k, n] and scale [k, 1], and 0 where the scale is 0.  # [k, n]"""
    return values.abs() / torch.where(scale > 0, scale, 1)
