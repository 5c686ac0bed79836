"""Which m of n positions: chosen by size, counted in bits, and coded.

The positions, in ascending order, are coded by whatever is shorter, which one bit says: a map of n bits, or the gaps
between them in Golomb's code (IEEE Trans. Inf. Theory 1966), whose parameter both sides know from m and n.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer


def kept(share: float, size: int) -> int:
    """How many of so many numbers a share is: rounded up, so one at least."""
    return min(size, math.ceil(round(share * size, 6)) or 1)  # 0.07 * 100 is 7.000000000000001


def largest(values: Tensor, m: int) -> Tensor:
    """The positions of the m largest of each row [k, n], ascending; of equal ones the first.  # [k, m] int64"""
    least = values.topk(m, dim=1, sorted=False).values.amin(1, keepdim=True)  # [k, 1]
    above, tied = values > least, values == least  # [k, n]
    room = m - above.sum(1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(1) <= room))
    place = torch.where(chosen, chosen.cumsum(1) - 1, m)  # all others go to a place that is cut off
    position = torch.arange(values.shape[1], device=values.device).expand_as(values)
    return place.new_empty(len(values), m + 1).scatter_(1, place, position)[:, :m]


def put(numbers: Tensor, positions: Tensor, size: int) -> Tensor:
    """Rows of zeros with numbers [k, m] at positions [k, m].  # [k, size]"""
    return numbers.new_zeros(len(numbers), size).scatter_(1, positions, numbers)


@functools.cache
def rice_width(m: int, n: int) -> int:
    """Bits of the remainder that make the code of a gap shortest where any m of n positions are equally likely.

    A gap is then nearly geometric with q = 1 - m/n, and its code takes 1 / (1 - q^(2^width)) + width bits on average.
    """
    q = 1 - m / n
    return min(range(n.bit_length() + 1), key=lambda width: 1 / (1 - q ** (1 << width)) + width)


def count(positions: Tensor, n: int) -> Tensor:
    """Bits of the code of positions [k, m].  # [k] int64"""
    width = rice_width(positions.shape[1], n)
    gaps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1)) - 1  # [k, m]
    return 1 + ((gaps >> width) + 1 + width).sum(1).clamp_max(n)


def write(positions: Tensor, n: int, out: Writer) -> None:
    """Positions [m] of n."""
    width, where = rice_width(len(positions), n), positions.tolist()
    gaps = [b - a - 1 for a, b in zip([-1, *where], where)]
    as_map = n < sum((gap >> width) + 1 + width for gap in gaps)
    out.fixed(int(as_map), 1)
    if as_map:
        out.fixed(sum(1 << (n - 1 - p) for p in where), n)
        return
    for gap in gaps:
        out.rice(gap, width)


def read(stream: Reader, m: int, n: int) -> Tensor:
    """The m positions of n.  # [1, m] int64"""
    if stream.fixed(1):
        found = [p for p in range(n) if stream.fixed(1)]
    else:
        width, found, at = rice_width(m, n), [], -1
        for _ in range(m):
            at += stream.rice(width) + 1
            found.append(at)
    return torch.tensor([found])
