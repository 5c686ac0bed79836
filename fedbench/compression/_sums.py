"""Sums in one order, whatever computes them.

torch.sum of a row may round otherwise among other rows, in several threads or on a GPU.  What is sent must not: the
other side of a real message has another machine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total(values: Tensor, dim: int = 1) -> Tensor:
    """The sum over an axis of one number or more: its second half is added to its first until one number is left.

    Additions of single numbers round alike everywhere.  The rounding error grows with log2 of their count.
    """
    while (count := values.shape[dim]) > 1:
        half = (count + 1) // 2
        values, rest = values.narrow(dim, 0, half).clone(), values.narrow(dim, half, count - half)
        values.narrow(dim, 0, count - half).add_(rest)
    return values.squeeze(dim)


def l2_norm(values: Tensor) -> Tensor:
    """l2 norms of rows [k, n], squared and summed in float64; never below the largest number.  # [k, 1] float32"""
    return total(values.double().square())[:, None].sqrt().float()


def mean_magnitude(values: Tensor) -> Tensor:
    """mean |x| of rows [k, n].  # [k, 1] float32"""
    return divided(total(values.double().abs())[:, None], values.shape[1]).float()


def divided(values: Tensor, by: float) -> Tensor:
    """values / by, rounded once: by a plain number a GPU divides as by its reciprocal, which is rounded too."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def over(values: Tensor, scale: Tensor) -> Tensor:
    """|values| [k, n] as shares of scale [k, 1], and 0 where that is 0."""
    return values.abs() / torch.where(scale > 0, scale, 1)
