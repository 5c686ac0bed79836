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
        """Write an integer 0 <= value < 2^width as `width` bits, highest bit first; no bits if width is 0."""
        self._bits.append(format(value, f"0{width}b") if width else "")

    def unary(self, value: int) -> None:
        """Write an integer value >= 0 as that many ones and a zero, value + 1 bits."""
        self._bits.append("1" * value + "0")

    def gamma(self, value: int) -> None:
        """Write an integer value >= 1 in the Elias gamma code, which has 2 floor(log2 value) + 1 bits."""
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
        """Write an integer value >= 0 in the Rice code: value >> width in unary, then the lowest `width` bits."""
        self.unary(value >> width)
        self.fixed(value & ((1 << width) - 1), width)

    def floats(self, values: Tensor) -> None:
        """Write the values of a float32 tensor [m] in order, each as the 32 bits of IEEE 754, sign bit first."""
        for bits in values.cpu().numpy().view(np.uint32).tolist():
            self.fixed(bits, 32)

    def stream(self) -> bytes:
        """Return all written bits as bytes; zeros fill the last byte."""
        bits = "".join(self._bits)
        bits += "0" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


class Reader:
    """Reader of a bit stream.  Each method reads what the Writer's method of the same name wrote."""

    def __init__(self, stream: bytes):
        self._bits = format(int.from_bytes(stream, "big"), f"0{8 * len(stream)}b")
        self._at = 0

    def fixed(self, width: int) -> int:
        """Read an integer >= 0 of `width` bits, highest bit first; return 0 without reading if width is 0."""
        self._at += width
        return int(self._bits[self._at - width : self._at] or "0", 2)

    def unary(self) -> int:
        """Read an integer >= 0 in unary code, that many ones and a zero."""
        begin, self._at = self._at, self._bits.index("0", self._at) + 1
        return self._at - 1 - begin

    def gamma(self) -> int:
        """Read an integer >= 1 in the Elias gamma code."""
        width = self.unary()
        return (1 << width) + self.fixed(width)

    def omega(self) -> int:
        """Read an integer >= 1 in the Elias omega code."""
        value = 1
        while self.fixed(1):
            value = (1 << value) + self.fixed(value)
        return value

    def rice(self, width: int) -> int:
        """Read an integer >= 0 in the Rice code: value >> width in unary, then the lowest `width` bits."""
        return (self.unary() << width) + self.fixed(width)

    def floats(self, count: int) -> Tensor:
        """Read `count` values of 32 bits each, which `Writer.floats` wrote.  # [count] float32"""
        bit_patterns = np.array([self.fixed(32) for _ in range(count)], np.uint32)
        return torch.from_numpy(bit_patterns.view(np.float32).copy())
