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
    """Return a compressor with |C(x) - x| <= |x|: the given one if it has this property, else a scaled one."""
    return compressor if compressor.contractive or compressor.exact else Scaled(compressor)


class Scaled(Compressor):
    """A compressor whose received rows are multiplied by a, which takes 32 more bits per row."""

    contractive = True

    def __init__(self, inner: Compressor):
        super().__init__(inner.error_feedback, inner.direction)
        self.inner = inner

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Encode rows by the inner compressor C, and add the factor a of each row for which a C(x) is nearest to x.

        Args:
            x: The rows.  # [k, n]
            draws: Random numbers, one key per row.
            message: Name of the message, size n of its rows, and its clients.

        Returns:
            The inner encoding with the code a [k, 1].
        """
        encoded = self.inner.compress(x, draws, message)
        received = self.inner.decompress(encoded, message).double()  # C(x)  [k, n]
        along, square = total(received * x.double()), total(received.square())  # <x, C(x)> and <C(x), C(x)>  [k] each
        # 0 if C(x) = 0
        a = (along / torch.where(square > 0, square, 1)).float()[:, None]
        return Encoded(encoded.values, {**encoded.codes, FACTOR: a})  # FACTOR: name of the code a

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the rows as they are received, the factor a times those of the inner compressor.  # [k, n]"""
        return encoded.codes[FACTOR] * self.inner.decompress(encoded, message)

    def num_values(self, message: Message) -> int:
        """Return the number of float32 values in the inner compressor's encoding of a row."""
        return self.inner.num_values(message)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the number of bits of the codes of each row: those of the inner compressor, and 32 for a.  # [k]"""
        return FLOAT + self.inner.count(encoded, message)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the codes of one row: the factor a, then those of the inner compressor."""
        out.floats(encoded.codes[FACTOR][0])
        self.inner.write(encoded, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row; return by name the factor a [1, 1] and those of the inner compressor."""
        factor = stream.floats(1)[None]
        return {**self.inner.read(stream, message), FACTOR: factor}

    def setup(self, rows: "RowStore", message: Message) -> None:
        """Create the inner compressor's client states for messages like this one."""
        self.inner.setup(rows, message)

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Update the inner compressor's states of the message's clients with `encoded`, after its transmission."""
        self.inner.update_state(encoded, message)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the inner compressor's tensors by name, for a checkpoint; the scaling itself has none."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of the inner compressor from the dict that `state_dict` returned."""
        self.inner.load_state_dict(state)
