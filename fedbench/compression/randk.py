"""Random-k: numbers at positions that a key tells, so that only the key and the numbers are sent.

Stich, Cordonnier and Jaggi, NeurIPS 2018; unbiased: Konecny et al., 2016 (Strategies for Improving Communication
Efficiency), random masks.  Positions are drawn without replacement.
"""

import torch
from torch import Tensor

from fedbench.compression import _positions as positions
from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Direction, Message, Operator, Sent
from fedbench.core.options import Fraction, require
from fedbench.core.rng import RowRandom

KEY = 64  # bits


class RandK(Operator):
    """share: of the numbers that are sent, rounded up to m of n; 1: all, as they are.  unbiased: what is seen is scaled
    by n / m."""

    leaves_numbers = True
    chooses = True

    def __init__(
        self, share: Fraction = 0.01, unbiased: bool = False, error_feedback: bool = True, direction: Direction = "up"
    ):
        super().__init__(error_feedback, direction)
        require(
            not (unbiased and error_feedback),
            "compression.unbiased=true scales numbers up, to be right on average without error feedback, and "
            "compression.error_feedback=true makes up for the rest: choose one of them",
        )
        self.share, self.unbiased, self.contracts, self.exact = share, unbiased, not unbiased, share == 1

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The values [k, m]; the key [k, 1], and the positions that it tells."""
        key = draws.words(1)
        where = self._positions(key, message)
        return Sent(x.gather(1, where), {"key": key, "positions": where})

    def _positions(self, key: Tensor, message: Message) -> Tensor:
        """Those of the m largest of n random words.  # [k, m]"""
        return positions.largest(RowRandom(key[:, 0]).words(message.size), self.num_numbers(message))

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """Zeros in all other places.  # [k, n]"""
        scale = message.size / self.num_numbers(message) if self.unbiased else 1.0
        return positions.put(sent.numbers * scale, sent.codes["positions"], message.size)

    def num_numbers(self, message: Message) -> int:
        """m, of n."""
        return positions.kept(self.share, message.size)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """Of the key.  # [k]"""
        return torch.full((len(sent.numbers),), KEY, device=sent.numbers.device)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """The key."""
        out.fixed(int(sent.codes["key"]) % 2**KEY, KEY)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The key, and the positions that it tells."""
        word = stream.fixed(KEY)
        key = torch.tensor([[word - 2**KEY if word >> (KEY - 1) else word]])
        return {"key": key, "positions": self._positions(key, message)}
