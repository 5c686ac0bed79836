"""Inner products and distances of rows with up to millions of numbers, accurate in float32.

Letters: k and m rows, P parameters, n blocks of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096  # columns that are summed in float32
COLUMNS = 1 << 16  # columns that are converted to float64 at a time
PIECE = 1 << 20  # columns of a matrix-vector product in float32


def dot(rows: Tensor, other: Tensor) -> Tensor:
    """Return inner products of rows, accurate for rows of millions of numbers.

    Blocks of columns are summed in float32, and the sums of the blocks are added in float64.  The product with a single
    vector of at most PIECE (1 million) numbers is one matrix-vector product in float32.

    Args:
        rows: Contiguous rows [k, P].
        other: A vector [P], or one vector per row [k, P].

    Returns:
        Inner products [k] float32.
    """
    if other.dim() == 1:
        if rows.shape[1] <= PIECE:
            return rows @ other
        pieces = [a @ b for a, b in zip(rows.split(PIECE, 1), other.split(PIECE))]  # each [k]
        return torch.stack(pieces).double().sum(0).to(rows.dtype)
    end = rows.shape[1] // BLOCK * BLOCK  # of the last full block
    blocks = (rows[:, :end] * other[:, :end]).unflatten(1, (-1, BLOCK)).sum(2)  # [k, n]
    rest = rows[:, end:].double() * other[:, end:].double()
    return (blocks.double().sum(1) + rest.sum(1)).to(rows.dtype)


def products(rows: Tensor, others: Tensor) -> Tensor:
    """Return the inner products of all pairs of rows, summed in float64.

    Args:
        rows: [k, P].
        others: [m, P].

    Returns:
        [k, m] float32.
    """
    total = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for a, b in zip(rows.split(COLUMNS, 1), others.split(COLUMNS, 1)):  # some columns at a time, to limit memory
        total += a.double() @ b.double().T
    return total.to(rows.dtype)


def squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the squared Euclidean distances of all pairs of rows.  Equal rows have a distance of exactly 0.

    Args:
        rows: [k, P].
        others: [m, P].

    Returns:
        [k, m] float32.
    """
    total = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for a, b in zip(rows.split(BLOCK, 1), others.split(BLOCK, 1)):  # small blocks: cdist sums naively in float32
        total += torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    return total.to(rows.dtype)
