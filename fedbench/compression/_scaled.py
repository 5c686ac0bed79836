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
    """Return a contractive compressor C: every row x is received as C(x) with |C(x) - x| <= |x|.

    It is the given compressor if its attribute `contractive` or `exact` is True, else that compressor in `Scaled`.
    """
    return compressor if compressor.contractive or compressor.exact else Scaled(compressor)


class Scaled(Compressor):
    """A compressor whose received rows are multiplied by a factor a, which takes 32 more bits per row."""

    contractive = True

    def __init__(self, inner: Compressor):
        super().__init__(inner.error_feedback, inner.direction)
        self.inner = inner

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Encode rows by the inner compressor C, and add the factor a of each row for which a C(x) is nearest to x.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            The inner encoding with the code a [k, 1].
        """
        encoded = self.inner.compress(x, draws, message)
        received = self.inner.decompress(encoded, message).double()  # C(x)  [k, n]
        along, square = total(received * x.double()), total(received.square())  # <x, C(x)> and <C(x), C(x)>  [k] each
        # <x, C(x)> / <C(x), C(x)>, the multiple of C(x) nearest to x; 0 if C(x) = 0
        a = (along / torch.where(square > 0, square, 1)).float()[:, None]
        return Encoded(encoded.values, {**encoded.codes, FACTOR: a})  # FACTOR: name of the code a

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the received rows: the inner compressor's, each times its factor a in encoded.codes.  # [k, n]"""
        return encoded.codes[FACTOR] * self.inner.decompress(encoded, message)

    def num_values(self, message: Message) -> int:
        """Return m, the number of float32 values in the inner compressor's encoding of a row; a is sent as a code.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return self.inner.num_values(message)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's codes: those of the inner compressor, and 32 for the factor a.  # [k] int64"""
        return FLOAT + self.inner.count(encoded, message)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the codes of one row (k = 1) to `out`: the factor a as 32 bits, then the inner compressor's codes.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        out.floats(encoded.codes[FACTOR][0])
        self.inner.write(encoded, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote.

        `message` describes what is sent (name, size n, clients), without its content.

        Returns:
            "damped/factor", the factor a [1, 1], and the inner compressor's codes by their names.
        """
        factor = stream.floats(1)[None]
        return {**self.inner.read(stream, message), FACTOR: factor}

    def setup(self, rows: "RowStore", message: Message) -> None:
        """Create the inner compressor's client states for all messages named message.name.

        Args:
            rows: Creates tensors with one row for each client of the run.
            message: Description of these messages, such as name and size; message.ids is empty.
        """
        self.inner.setup(rows, message)

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Let the inner compressor update the states of the clients message.ids after `encoded` was transmitted."""
        self.inner.update_state(encoded, message)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the inner compressor's tensors by name, for a checkpoint; the scaling itself has none."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of the inner compressor from the dict that `state_dict` returned."""
        self.inner.load_state_dict(state)
