"""Top-k: the numbers of largest magnitude, and where they are.

Stich, Cordonnier and Jaggi, NeurIPS 2018 (Sparsified SGD with Memory).  Departs from the paper: k is a share of the
row, and positions are coded (_positions.py).
"""

from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Direction, Message, Operator, Sent
from fedbench.core.options import Fraction
from fedbench.core.rng import RowRandom


class TopK(Operator):
    """share: of the numbers that are sent, rounded up; 1: all, as they are.  Of equal magnitudes the first are sent."""

    contracts = True
    leaves_numbers = True
    chooses = True

    def __init__(self, share: Fraction = 0.01, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self.share, self.exact = share, share == 1

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The values [k, m], and positions [k, m]."""
        where = positions.largest(x.abs(), self.num_numbers(message))
        return Sent(x.gather(1, where), {"positions": where})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """Zeros in all other places.  # [k, n]"""
        return positions.put(sent.numbers, sent.codes["positions"], message.size)

    def num_numbers(self, message: Message) -> int:
        """m, of n."""
        return positions.kept(self.share, message.size)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """Of the positions.  # [k]"""
        return positions.count(sent.codes["positions"], message.size)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """The positions."""
        positions.write(sent.codes["positions"][0], message.size, out)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The positions."""
        return {"positions": positions.read(stream, self.num_numbers(message), message.size)}
