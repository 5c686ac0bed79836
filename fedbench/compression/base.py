"""What operators have in common: rows go in, what the other side sees of them and the bits that were sent come out.

An operator is written as five small functions: `pack` turns rows into what is sent, `unpack` turns that into what is
seen, `count` says how many bits it takes, and `write` and `read` are the stream itself, of one row.  `__call__`, for
many clients at once, and `encode` and `decode`, for one, are made of these here, so that they cannot disagree.

Letters: k clients, n numbers of a row, m of them, or others, that are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore

Direction = Literal["up", "both"]
Span = tuple[int, int, tuple[int, ...]]  # a parameter's columns in the row, a to b, and its shape
FLOAT = 32  # bits of a number that is sent as it is
LIMIT = 2.0**100  # numbers from which on a row counts as diverged: below, no norm and no product overflows
BLOCK = 1 << 22  # numbers that are compressed at a time


@dataclass(frozen=True, eq=False)
class Message:
    """What both sides know about a message before it is sent.

    Attributes:
        name: Name that the method gave the message.
        size: n, the numbers in a row.
        ids: [k], the clients of the rows, which have states.  None for a row that is the same for all clients.
        spans: The parameters in a row of the model, in the order of their columns.  None for any other row.
        weights: [k], each client's weight in a mean that the server takes.  None for messages of the server.
        cohort: The weights of the whole cohort.  None for messages of the server.
    """

    name: str
    size: int
    ids: np.ndarray
    spans: Mapping[str, Span] = field(default_factory=dict)
    weights: Tensor | None = None
    cohort: Tensor | None = None

    def of(self, a: int, b: int) -> Message:
        """The same for the clients a to b of these."""
        return replace(self, ids=self.ids[a:b], weights=None if self.weights is None else self.weights[a:b])


@dataclass
class Sent:
    """What is sent of k rows: numbers [k, m] float32 as they are, and codes by name, [k, ...] each."""

    numbers: Tensor
    codes: dict[str, Tensor] = field(default_factory=dict)


class Operator:
    """A way to send rows of float32 in fewer bits.

    error_feedback: whether clients add the residual of an upload to their next one, where uploads accumulate (Stich et
    al., NeurIPS 2018).  direction: "up", or "both" where the server compresses, too.  Both are for the channel.

    exact: the row arrives as it is.  unbiased: a row is what is seen of it on average over draws.  contracts: what is
    seen of a row is no farther from it than 0 is; other operators are damped where the rest is remembered
    (_damped.py).  leaves_numbers: there are numbers in what is sent, which a chain may compress further.  chooses:
    positions of a row.  reads_spans: the shapes of parameters.

    A row's result depends on that row, its key and its client's state alone, bit for bit, on any device: sums go by
    _sums.py, and draws by RowRandom.  A row that has diverged (a number is not finite, or of 2^100 and more) cannot be
    sent unless the operator is exact: its stream is empty, and NaN is seen in every place.
    """

    exact = False
    unbiased = False
    contracts = False
    leaves_numbers = False
    chooses = False
    reads_spans = False

    def __init__(self, error_feedback: bool, direction: Direction):
        self.error_feedback = error_feedback
        self.direction: Direction = direction

    # -- what an operator is -----------------------------------------------------------------------------
    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """What is sent of rows x [k, n], which stay as they are; it has num_numbers(message) numbers a row."""
        raise NotImplementedError

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """What the other side sees.  # [k, n]"""
        raise NotImplementedError

    def num_numbers(self, message: Message) -> int:
        """m."""
        return 0

    def count(self, sent: Sent, message: Message) -> Tensor:
        """Bits of the codes, as `write` writes them.  # [k] int64"""
        raise NotImplementedError

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """Put the codes of one row, k = 1, on a stream.  They end by themselves: more may follow."""
        raise NotImplementedError

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """The codes of one row, as `pack` gave them.  # [1, ...] each"""
        raise NotImplementedError

    # -- what it remembers -------------------------------------------------------------------------------
    def setup(self, rows: RowStore, message: Message) -> None:
        """Make the clients' states, if any, for messages of this kind, before the first one; message.ids is empty."""

    def keep(self, sent: Sent, message: Message) -> None:
        """Write the clients' states after rows were sent; `pack` only reads them."""

    @property
    def reads_losses(self) -> bool:
        """Whether it has an `observe`, for which clients tell their training losses."""
        return type(self).observe is not Operator.observe

    def observe(self, losses: Tensor) -> None:
        """Learn from the cohort's training losses [K] after a round."""

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor on self by name; rows are saved by their store."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set what `state_dict` gave, on the device of what stands there now."""
        for name, value in state.items():
            now = getattr(self, name, None)
            setattr(self, name, value.to(now.device) if isinstance(now, Tensor) else value)

    # -- what is made of it ------------------------------------------------------------------------------
    def __call__(self, x: Tensor, draws: RowRandom, message: Message, keep: bool = True) -> tuple[Tensor, Tensor]:
        """What the other side sees of rows x [k, n] float32, and the bits that it takes.  # [k, n], [k] int64

        draws: one key a client and message.  keep: whether clients' states change.  Nothing waits for the device.
        """
        _check(x, message)
        if self.exact or not message.size:
            return x, torch.full((len(x),), FLOAT * message.size, device=x.device)
        seen, bits = torch.empty_like(x), torch.empty(len(x), dtype=torch.int64, device=x.device)
        size, calls = max(1, BLOCK // message.size), draws.calls
        for a in range(0, len(x), size):
            some = slice(a, a + size)
            draws_here = RowRandom(draws.keys[some])
            draws_here.calls = calls
            seen[some], bits[some] = self._block(x[some], draws_here, message.of(a, a + size), keep)
            draws.calls = draws_here.calls
        return seen, bits

    def _block(self, x: Tensor, draws: RowRandom, message: Message, keep: bool) -> tuple[Tensor, Tensor]:
        can_be_sent = (x.abs() < LIMIT).all(1)  # NaN is not below  # [k]
        sent = self.pack(torch.where(can_be_sent[:, None], x, 0), draws, message)
        seen = self.unpack(sent, message)
        bits = self.count(sent, message) + FLOAT * self.num_numbers(message)
        if keep:
            self.keep(sent, message)
        return torch.where(can_be_sent[:, None], seen, torch.nan), torch.where(can_be_sent, bits, 0)

    def encode(self, x: Tensor, draws: RowRandom, message: Message) -> bytes:
        """The stream that is sent of one client's row x [n]; draws: its key alone.  Its state stays as it is."""
        out = Writer()
        if self.exact or not message.size:
            out.floats(x)
        elif bool((x.abs() < LIMIT).all()):
            sent = self.pack(x[None], draws, message)
            self.write(sent, out, message)
            out.floats(sent.numbers[0])
        return out.stream()

    def decode(self, stream: bytes, message: Message) -> Tensor:
        """What the other side sees of one row, from its stream.  # [n]"""
        if not stream:
            return torch.full((message.size,), torch.nan)
        reader = Reader(stream)
        if self.exact:
            return reader.floats(message.size)
        codes = self.read(reader, message)
        return self.unpack(Sent(reader.floats(self.num_numbers(message))[None], codes), message)[0]


def _check(x: Tensor, message: Message) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != message.size:
        got: Any = tuple(x.shape)
        raise ValueError(f"{message.name}: rows of float32 [k, {message.size}] can be compressed, got {x.dtype} {got}")
