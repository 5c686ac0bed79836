"""Scaling that makes any compressor contractive, for error feedback and for differences to a reference.

In both cases a residual d is compressed to C(d), and d <- d - C(d) remains.  The residual grows if C(d) is farther from
d than 0 is, as the output of an unbiased compressor can be.  It never grows if a C(d) is sent instead, where
a = <d, C(d)> / <C(d), C(d)> gives the multiple of C(d) that is nearest to d.  For an unbiased compressor of variance
omega, a is about 1 / (1 + omega), the step size of DIANA (Mishchenko et al., 2019), without a bound on omega.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import total
from fedbench.compression.base import FLOAT, Compressor, Encoded, Message
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore

FACTOR = "damped/factor"


def contractive(compressor: Compressor) -> Compressor:
    """Return the compressor, scaled unless it is already contractive."""
    return compressor if compressor.contractive or compressor.exact else Scaled(compressor)


class Scaled(Compressor):
    """A compressor whose received rows are multiplied by a, which takes 32 more bits per row."""

    contractive = True

    def __init__(self, inner: Compressor):
        super().__init__(inner.error_feedback, inner.direction)
        self.inner = inner

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Return the encoding of the inner compressor, and a [k, 1]."""
        encoded = self.inner.compress(x, draws, message)
        received = self.inner.decompress(encoded, message).double()
        along, square = total(received * x.double()), total(received.square())
        a = (along / torch.where(square > 0, square, 1)).float()[:, None]  # module docstring; 0 if C(x) = 0
        return Encoded(encoded.values, {**encoded.codes, FACTOR: a})

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return a C(x).  # [k, n]"""
        return encoded.codes[FACTOR] * self.inner.decompress(encoded, message)

    def num_values(self, message: Message) -> int:
        """Return the number of values of the inner encoding."""
        return self.inner.num_values(message)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of the inner codes and of a.  # [k]"""
        return FLOAT + self.inner.count(encoded, message)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write a, then the inner codes."""
        out.floats(encoded.codes[FACTOR][0])
        self.inner.write(encoded, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read a, then the inner codes."""
        factor = stream.floats(1)[None]
        return {**self.inner.read(stream, message), FACTOR: factor}

    def setup(self, rows: "RowStore", message: Message) -> None:
        """Create the states of the inner compressor."""
        self.inner.setup(rows, message)

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Update the states of the inner compressor."""
        self.inner.update_state(encoded, message)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the inner compressor."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of the inner compressor."""
        self.inner.load_state_dict(state)
