"""Row algebra that methods share: products over a million numbers that keep their digits, distances, cosines."""

from __future__ import annotations

from torch import Tensor

BLOCK = 512


def dot(rows: Tensor, other: Tensor) -> Tensor:
    """Inner products of rows [k, P] with other [P] or [k, P], row by row.  # [k] float32

    Products of 512 numbers are summed in float32 and these sums in float64: as good as float64 throughout where
    P is a million, without a float64 copy of the rows.
    """
    k, size = rows.shape
    whole = size // BLOCK * BLOCK
    a = rows[:, :whole].unflatten(1, (-1, 1, BLOCK))                                   # [k, n, 1, 512]
    b = other[..., :whole].unflatten(-1, (-1, BLOCK, 1)).expand(k, -1, -1, -1)         # [k, n, 512, 1]
    total = (a @ b).double().sum((1, 2, 3))
    return (total + (rows[:, whole:].double() * other[..., whole:].double()).sum(1)).to(rows.dtype)
