"""Bit streams: the exact bits of one row, in plain Python.

References:
    Elias, IEEE Trans. Inf. Theory 1975 (gamma and omega codes); Golomb, IEEE Trans. Inf. Theory 1966, and Rice, 1979
    (unary quotient and a remainder of fixed width, for divisors that are powers of 2).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Writer:
    """Writer of a bit stream, most significant bit first.  Zeros fill the last byte."""

    def __init__(self) -> None:
        self._bits: list[str] = []

    def fixed(self, value: int, width: int) -> None:
        """Write 0 <= value < 2^width in width bits."""
        self._bits.append(format(value, f"0{width}b") if width else "")

    def unary(self, value: int) -> None:
        """Write value >= 0 in value + 1 bits."""
        self._bits.append("1" * value + "0")

    def gamma(self, value: int) -> None:
        """Write the Elias gamma code of value >= 1, in 2 floor(log2 value) + 1 bits."""
        width = value.bit_length()
        self.unary(width - 1)
        self.fixed(value - (1 << (width - 1)), width - 1)

    def omega(self, value: int) -> None:
        """Write the Elias omega code of value >= 1.

        The code ends in a 0, preceded by the binary digits of the value.  These are preceded by the digits of their
        count minus 1, and so on until the value is 1.
        """
        groups = ["0"]
        while value > 1:
            groups.append(format(value, "b"))
            value = len(groups[-1]) - 1
        self._bits.extend(reversed(groups))

    def rice(self, value: int, width: int) -> None:
        """Write the Rice code of value >= 0, in (value >> width) + 1 + width bits."""
        self.unary(value >> width)
        self.fixed(value & ((1 << width) - 1), width)

    def floats(self, values: Tensor) -> None:
        """Write values [m] float32 in 32 bits each."""
        for bits in values.cpu().numpy().view(np.uint32).tolist():
            self.fixed(bits, 32)

    def stream(self) -> bytes:
        """Return the stream."""
        bits = "".join(self._bits)
        bits += "0" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


class Reader:
    """Reader of a bit stream.  Each method reads what the Writer's method of the same name wrote."""

    def __init__(self, stream: bytes):
        self._bits = format(int.from_bytes(stream, "big"), f"0{8 * len(stream)}b")
        self._at = 0

    def fixed(self, width: int) -> int:
        """Read a value of width bits."""
        self._at += width
        return int(self._bits[self._at - width : self._at] or "0", 2)

    def unary(self) -> int:
        """Read a unary code."""
        begin, self._at = self._at, self._bits.index("0", self._at) + 1
        return self._at - 1 - begin

    def gamma(self) -> int:
        """Read an Elias gamma code."""
        width = self.unary()
        return (1 << width) + self.fixed(width)

    def omega(self) -> int:
        """Read an Elias omega code."""
        value = 1
        while self.fixed(1):
            value = (1 << value) + self.fixed(value)
        return value

    def rice(self, width: int) -> int:
        """Read a Rice code."""
        return (self.unary() << width) + self.fixed(width)

    def floats(self, count: int) -> Tensor:
        """Read float32 values.  # [count]"""
        bit_patterns = np.array([self.fixed(32) for _ in range(count)], np.uint32)
        return torch.from_numpy(bit_patterns.view(np.float32).copy())
