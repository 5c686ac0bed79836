"""Operations on each column of some rows, which need its sorted values.

Letters: m rows, p columns, b columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = 2048  # columns that are sorted at a time
ROUNDING = 1e-6  # of a sum of normalized float32 weights


def are_equal(weights: Tensor) -> bool:
    """Return whether all weights [m] are exactly equal."""
    return bool((weights == weights[0]).all())


def sorted_columns(rows: Tensor) -> Iterator[Tensor]:
    """Yield blocks of columns, each column sorted in ascending order.  Blocks limit memory.

    On a CPU, NumPy sorts short columns much faster than torch.

    Args:
        rows: The rows.  # [m, p]

    Yields:
        The sorted values of some columns.  # [b, m]
    """
    for block in rows.split(BLOCK, 1):
        columns = block.T.contiguous()  # [b, m]
        yield torch.from_numpy(np.sort(columns.numpy(), 1)) if columns.is_cpu else columns.sort(1).values


def sorted_with_weights(rows: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of columns, each column sorted in ascending order, and the weight of each value.

    Args:
        rows: The rows.  # [m, p]
        weights: Weights of the rows.  # [m]

    Yields:
        The sorted values of some columns [b, m], and their weights [b, m].
    """
    for block in rows.split(BLOCK, 1):
        if block.is_cpu and block.dtype == torch.float32:
            values, order = _sort_with_positions(block)
        else:
            values, order = block.T.sort(1)
        yield values, weights.take(order)


def _sort_with_positions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sort columns of float32 rows on a CPU, and return where the values were.

    Sorting numbers alone is much faster than finding their order.  A float64 has 29 more bits than a float32, so the
    position of a value is stored in the last bits of its float64.

    Args:
        rows: The rows, fewer than 2^28, without infinite values and NaN, whose positions would be lost.
            # [m, p] float32

    Returns:
        The sorted values of each column [p, m], and the row of each value [p, m] int64.
    """
    m = len(rows)
    columns = np.ascontiguousarray(rows.T.numpy(), dtype=np.float64)  # [p, m]
    bits = columns.view(np.int64)  # the same memory
    bits |= np.arange(m)  # the last 29 bits of a float32 are 0
    columns.sort(1)
    order = bits & ((1 << m.bit_length()) - 1)
    return torch.from_numpy(columns).float(), torch.from_numpy(order)  # rounding to float32 removes the positions


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted median of each column.

    It is the mean of the lower and the upper median.  These are the smallest values up to which the weights sum to at
    least, and to more than, half of the total.  With equal weights, it is the usual median.

    Args:
        rows: The rows.  # [m, p]
        weights: Weights of the rows, with sum 1.  # [m]

    Returns:
        The medians.  # [p]
    """
    last = len(rows) - 1
    if are_equal(weights):
        return torch.cat([(values[:, last // 2] + values[:, (last + 1) // 2]) / 2 for values in sorted_columns(rows)])
    medians = []
    for values, w in sorted_with_weights(rows, weights.double()):
        cumulative = w.cumsum(1)  # [b, m]
        # ROUNDING: also weights that sum to half but for rounding errors
        lower = (cumulative < 0.5 - ROUNDING).sum(1, keepdim=True)  # position of the lower median  [b, 1]
        upper = (cumulative < 0.5 + ROUNDING).sum(1, keepdim=True).clamp_max(last)  # of the upper one  [b, 1]
        medians.append((values.gather(1, lower) + values.gather(1, upper))[:, 0] / 2)
    return torch.cat(medians)
