"""Operators where the rest is remembered: a memory, or a reference that follows what was sent.

There what was due changes by what is seen, d <- d - C(d), and grows where C(d) is farther from d than 0 is, as what
is right on average may well be.  It shrinks under a C(d), where a = <d, C(d)> / <C(d), C(d)> makes that the nearest
multiple of C(d): a is 1 / (1 + omega), about, for an unbiased operator of variance omega, DIANA's step (Mishchenko et
al., 2019), and needs no bound on omega to be known.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import total
from fedbench.compression.base import FLOAT, Message, Operator, Sent
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore

FACTOR = "damped/factor"


def contracting(operator: Operator) -> Operator:
    """The operator, damped unless it contracts by itself."""
    return operator if operator.contracts or operator.exact else Damped(operator)


class Damped(Operator):
    """inner, scaled by the a of each row, which takes 32 bits more."""

    contracts = True

    def __init__(self, inner: Operator):
        super().__init__(inner.error_feedback, inner.direction)
        self.inner = inner

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """What inner sends, and a [k, 1]."""
        sent = self.inner.pack(x, draws, message)
        seen = self.inner.unpack(sent, message).double()
        along, square = total(seen * x.double()), total(seen.square())
        a = (along / torch.where(square > 0, square, 1)).float()[:, None]
        return Sent(sent.numbers, {**sent.codes, FACTOR: a})

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """a C(x).  # [k, n]"""
        return sent.codes[FACTOR] * self.inner.unpack(sent, message)

    def num_numbers(self, message: Message) -> int:
        """inner's."""
        return self.inner.num_numbers(message)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """inner's, and a.  # [k]"""
        return FLOAT + self.inner.count(sent, message)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """a, and what inner writes."""
        out.floats(sent.codes[FACTOR][0])
        self.inner.write(sent, out, message)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """a, and what inner reads."""
        factor = stream.floats(1)[None]
        return {**self.inner.read(stream, message), FACTOR: factor}

    def setup(self, rows: "RowStore", message: Message) -> None:
        """inner's states."""
        self.inner.setup(rows, message)

    def keep(self, sent: Sent, message: Message) -> None:
        """inner's."""
        self.inner.keep(sent, message)

    def state_dict(self) -> dict[str, Tensor]:
        """inner's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """inner's."""
        self.inner.load_state_dict(state)
