"""Pre-aggregation: nearest-neighbour mixing and bucketing; and the distances of rows.

Letters: n rows, p columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 8192  # columns that are converted to float64 at a time


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared Euclidean distances of all pairs of rows, from inner products in float64.

    Args:
        rows: The rows.  # [n, p]

    Returns:
        The squared distances, with zeros on the diagonal.  # [n, n] float64
    """
    products = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for block in rows.split(COLUMNS, 1):  # some columns at a time, to limit memory
        block = block.double()
        products += block @ block.T
    squares = products.diagonal()  # [n]
    return (squares[:, None] + squares - 2 * products).clamp_min(0).fill_diagonal_(0)


def distances(rows: Tensor, point: Tensor) -> Tensor:
    """Return the Euclidean distance of each row [n, p] to a point [p].  # [n]"""
    return torch.stack([torch.linalg.vector_norm(row - point) for row in rows])  # without a copy of all rows


def mix_nearest(rows: Tensor, weights: Tensor, f: int) -> Tensor:
    """Replace each row by the weighted mean of its n - f nearest rows, itself included (NNM).

    Args:
        rows: The rows.  # [n, p]
        weights: Weights of the rows, with sum 1.  # [n]
        f: Number of the farthest rows that are left out.

    Returns:
        The means.  # [n, p]
    """
    if f == 0:  # all rows are neighbours of each row
        return (weights @ rows).expand_as(rows)
    nearest = squared_distances(rows).topk(len(rows) - f, largest=False).indices  # [n, n - f]
    mixing = torch.zeros(len(rows), len(rows), dtype=rows.dtype, device=rows.device)
    mixing = mixing.scatter(1, nearest, weights[nearest])  # row i: weights of the rows that are mixed into row i
    return (mixing / mixing.sum(1, keepdim=True)) @ rows


def bucket_means(rows: Tensor, weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of each bucket of successive rows, and the total weight of the bucket.

    Args:
        rows: The rows, in random order.  # [n, p]
        weights: Weights of the rows, with sum 1.  # [n]
        size: Number of rows in a bucket.  The last bucket may have fewer.

    Returns:
        The means [m, p] and weights [m] of the m buckets.
    """
    pairs = list(zip(rows.split(size), weights.split(size)))
    totals = torch.stack([w.sum() for _, w in pairs])  # [m]
    return torch.stack([(w / w.sum()) @ x for x, w in pairs]), totals
