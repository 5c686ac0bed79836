"""Selection and coding of m of n positions.

Ascending positions are coded as a bitmap of n bits, or as the gaps between them in a Golomb code (IEEE Trans. Inf.
Theory 1966) whose parameter follows from m and n.  The shorter code is used, and one bit names it.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer


def num_selected(share: float, size: int) -> int:
    """Return how many of `size` values are selected: ceil(share * size), at least 1; share is a fraction in (0, 1]."""
    return min(size, math.ceil(round(share * size, 6)) or 1)  # 0.07 * 100 is 7.000000000000001


def largest(values: Tensor, m: int) -> Tensor:
    """Return the positions of the m largest values of each row, in ascending order of positions.

    Args:
        values: The rows.  # [k, n]
        m: Number of positions; of equal values, the first are selected.

    Returns:
        The positions.  # [k, m] int64
    """
    smallest = values.topk(m, dim=1, sorted=False).values.amin(1, keepdim=True)  # the m-th largest value  [k, 1]
    above, tied = values > smallest, values == smallest  # [k, n]
    num_tied = m - above.sum(1, keepdim=True)  # how many of the tied values are selected
    selected = above | (tied & (tied.cumsum(1) <= num_tied))
    slot = torch.where(selected, selected.cumsum(1) - 1, m)  # slot m collects all others and is cut off
    position = torch.arange(values.shape[1], device=values.device).expand_as(values)
    return slot.new_empty(len(values), m + 1).scatter_(1, slot, position)[:, :m]


def scatter(values: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return rows of `size` zeros, in which values [k, m] are written at positions [k, m].  # [k, size]"""
    return values.new_zeros(len(values), size).scatter_(1, positions, values)


@functools.cache
def rice_width(m: int, n: int) -> int:
    """Return the remainder width of the shortest Rice code of the gaps if all m of n positions are equally likely.

    A gap is then nearly geometric with q = 1 - m/n, and its code takes 1 / (1 - q^(2^width)) + width bits on average.
    """
    q = 1 - m / n
    return min(range(n.bit_length() + 1), key=lambda width: 1 / (1 - q ** (1 << width)) + width)


def count(positions: Tensor, n: int) -> Tensor:
    """Return the number of bits that `write` takes for each row of positions.

    Args:
        positions: The selected positions, from 0 to n - 1, ascending.  # [k, m]
        n: Number of possible positions, the length of a row.

    Returns:
        The numbers of bits.  # [k] int64
    """
    width = rice_width(positions.shape[1], n)  # remainder bits of the Rice code
    gaps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1)) - 1  # [k, m]
    # one bit names the code; then the bits of all gaps, or n bits of a bitmap if these are fewer
    return 1 + ((gaps >> width) + 1 + width).sum(1).clamp_max(n)


def write(positions: Tensor, n: int, out: Writer) -> None:
    """Write m ascending positions of n to a stream: as a bitmap or as Rice codes of gaps, whichever is shorter.

    Args:
        positions: The positions.  # [m]
        n: Number of possible positions.
        out: The stream.
    """
    width, ascending = rice_width(len(positions), n), positions.tolist()
    gaps = [b - a - 1 for a, b in zip([-1, *ascending], ascending)]  # positions between neighbours
    # n bits of a bitmap are fewer than the bits of all gaps
    is_bitmap = n < sum((gap >> width) + 1 + width for gap in gaps)
    out.fixed(int(is_bitmap), 1)  # the first bit names the code
    if is_bitmap:
        out.fixed(sum(1 << (n - 1 - p) for p in ascending), n)  # bit p is 1 for a selected position
        return
    for gap in gaps:
        out.rice(gap, width)


def read(stream: Reader, m: int, n: int) -> Tensor:
    """Read the selected positions of one row, which `write` wrote.

    Args:
        stream: The stream, whose next bits are the positions.
        m: Number of selected positions.
        n: Number of possible positions, the length of a row.

    Returns:
        The positions, from 0 to n - 1, ascending.  # [1, m] int64
    """
    if stream.fixed(1):  # the first bit is 1 for a bitmap
        positions = [p for p in range(n) if stream.fixed(1)]
    else:
        width, positions, position = rice_width(m, n), [], -1
        for _ in range(m):
            position += stream.rice(width) + 1  # the gap counts positions in between
            positions.append(position)
    return torch.tensor([positions])
