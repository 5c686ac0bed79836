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
        half = (count + 1) // 2  # the first half is longer if count is odd
        values, rest = values.narrow(dim, 0, half).clone(), values.narrow(dim, half, count - half)
        values.narrow(dim, 0, count - half).add_(rest)
    return values.squeeze(dim)


def l2_norm(values: Tensor) -> Tensor:
    """Return the l2 norm of each row [k, n], summed in float64 in a fixed order.  # [k, 1] float32"""
    return total(values.double().square())[:, None].sqrt().float()


def mean_magnitude(values: Tensor) -> Tensor:
    """Return the mean absolute value of each row [k, n], summed in float64 in a fixed order.  # [k, 1] float32"""
    return divided(total(values.double().abs())[:, None], values.shape[1]).float()


def divided(values: Tensor, by: float) -> Tensor:
    """Return values / by, element by element, with equal rounding on every device.

    For a Python number, a GPU may multiply by its rounded reciprocal instead, so `by` is converted to a tensor.
    """
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def over(values: Tensor, scale: Tensor) -> Tensor:
    """Return |values| / scale for rows values [k, n] and scale [k, 1]; |values| where the scale is 0.  # [k, n]"""
    return values.abs() / torch.where(scale > 0, scale, 1)
