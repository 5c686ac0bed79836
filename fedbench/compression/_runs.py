"""Coding of integer rows that are mostly 0: run lengths of zeros and nonzero integers, in Elias omega codes.

Each nonzero integer has three codes: 1 + the number of zeros before it, its sign (one bit) and its magnitude.  Zeros
at the end of a row are coded as one more run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer


def omega_length(value: int) -> int:
    """Return the number of bits of the Elias omega code of an integer value >= 1."""
    bits = 1
    while value > 1:
        bits, value = bits + value.bit_length(), value.bit_length() - 1
    return bits


LENGTHS = [omega_length(1 << exponent) for exponent in range(53)]  # lengths depend only on floor(log2 value)


def omega_lengths(values: Tensor) -> Tensor:
    """Return the number of bits of the Elias omega code of each integer, for 1 <= values < 2^53.

    # int64, in the shape of values
    """
    exponents = torch.frexp(values.double()).exponent - 1  # floor(log2 value)
    return torch.tensor(LENGTHS, device=values.device)[exponents.long()]  # LENGTHS: bits by floor(log2 value)


def count(levels: Tensor) -> Tensor:
    """Return the number of bits that `write` takes for each row of levels [k, n], positive or negative.  # [k] int64"""
    n, is_nonzero = levels.shape[1], levels != 0
    index = torch.arange(n, device=levels.device)
    last = torch.where(is_nonzero, index, -1).cummax(1).values  # index of the last nonzero integer so far  [k, n]
    gaps = index - torch.cat([last.new_full((len(last), 1), -1), last[:, :-1]], 1)  # 1 + zeros before  [k, n]
    bits = omega_lengths(gaps) + 1 + omega_lengths(levels.abs().clamp_min(1))  # of zeros before, sign and magnitude
    rest = n - last[:, -1]  # 1 + zeros at the end; 1 needs no code  [k]
    return torch.where(is_nonzero, bits, 0).sum(1) + torch.where(rest > 1, omega_lengths(rest), 0)


def write(levels: Tensor, out: Writer) -> None:
    """Write one row of integers, levels [n], as runs of zeros and nonzero integers.

    Before each nonzero integer, 1 + the number of zeros is written, because Elias omega codes are for integers >= 1.
    """
    zeros = 0
    for level in levels.tolist():
        if level == 0:
            zeros += 1
            continue
        out.omega(zeros + 1)
        out.fixed(int(level < 0), 1)  # the sign
        out.omega(abs(level))
        zeros = 0
    if zeros:
        out.omega(zeros + 1)


def read(stream: Reader, n: int) -> list[int]:
    """Read one row that `write` wrote; return its n integers, positive, negative or 0."""
    levels: list[int] = []
    while len(levels) < n:
        levels += [0] * (stream.omega() - 1)  # a run of zeros; its code is 1 + their number
        if len(levels) < n:  # else the row ends with zeros
            sign = -1 if stream.fixed(1) else 1  # one bit
            levels.append(sign * stream.omega())
    return levels
