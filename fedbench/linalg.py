"""Row algebra that methods share: products over a million numbers that keep their digits, distances, cosines."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512
COLUMNS = 1 << 16          # of rows copied to float64 at a time


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


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Inner products of every row [k, P] with every other one [m, P], summed in float64.  # [k, m] float32"""
    total = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for a, b in zip(rows.split(COLUMNS, 1), others.split(COLUMNS, 1)):
        total += a.double() @ b.double().T
    return total.to(rows.dtype)


def squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """||a - b||^2 of every row [k, P] and every other one [m, P]; equal rows are at exactly 0.  # [k, m]"""
    total = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for a, b in zip(rows.split(8 * BLOCK, 1), others.split(8 * BLOCK, 1)):          # it sums naively: 2e-5 of a block
        total += torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    return total.to(rows.dtype)
