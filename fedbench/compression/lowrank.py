"""Low rank: every parameter matrix as a product of two thin ones, by one power iteration from a random start.

Vogels, Karimireddy and Jaggi, NeurIPS 2019 (PowerSGD), Algorithm 1.  Departs from the paper: the start is drawn for
every message unless warm_start asks for the last one's result; every client has factors of its own, in place of ones
that all average on the way.  A convolution [o, i, h, w] is a matrix [o, i h w]; vectors, and matrices whose factors are
no smaller, are sent as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import l2_norm, total
from fedbench.compression.base import LIMIT, Direction, Message, Operator, Sent
from fedbench.core.options import Count
from fedbench.core.rng import RowRandom
from fedbench.core.rows import Rows, RowStore

DEPENDENT = 1e-5  # of a column's norm: what is left of it beside the others' span is rounding


class _Part(NamedTuple):
    """Columns begin to end of a row: a matrix [a, b] sent by factors of rank r, or numbers as they are (r = 0)."""

    begin: int
    end: int
    a: int = 0
    b: int = 0
    r: int = 0

    @property
    def numbers(self) -> int:
        return self.r * (self.a + self.b) if self.r else self.end - self.begin


class LowRank(Operator):
    """rank: of each factor.  warm_start: a client goes on from the factors that it sent last.

    State: last [N, sum of b r] of each kind of message, 0 where the start is drawn.
    """

    contracts = True
    leaves_numbers = False  # that one scale would suit: P's are below 1, Q's and the vectors' of the row's size
    reads_spans = True

    def __init__(
        self, rank: Count = 2, warm_start: bool = False, error_feedback: bool = True, direction: Direction = "up"
    ):
        super().__init__(error_feedback, direction)
        self.rank, self.warm_start = rank, warm_start
        self.last: dict[str, Rows] = {}

    def setup(self, rows: RowStore, message: Message) -> None:
        """A row for the second factors of all matrices."""
        size = sum(part.b * part.r for part in self._parts(message))
        if self.warm_start and size:
            self.last[message.name] = rows(f"compression/{message.name}", torch.zeros(size))

    def keep(self, sent: Sent, message: Message) -> None:
        """The second factors that were sent."""
        if self._is_warm(message):
            second = [piece[1].flatten(1) for piece in self._pieces(sent, message) if len(piece) == 2]
            self.last[message.name][message.ids] = torch.cat(second, 1)

    def _is_warm(self, message: Message) -> bool:
        return self.warm_start and message.name in self.last and len(message.ids) > 0

    def _parts(self, message: Message) -> list[_Part]:
        """All columns of the row, cut at its matrices."""
        parts, at = [], 0
        for begin, end, shape in message.spans.values():
            a = shape[0] if len(shape) > 1 else 1
            b = (end - begin) // max(a, 1)
            r = min(self.rank, a, b)
            if r * (a + b) < a * b:
                parts += [_Part(at, begin), _Part(begin, end, a, b, r)]
                at = end
        return [p for p in [*parts, _Part(at, message.size)] if p.begin < p.end]

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """Both factors of each matrix, and all other numbers.  # [k, m]"""
        sent, starts = [], self._starts(draws, message)
        for part in self._parts(message):
            columns = x[:, part.begin : part.end]
            if part.r:
                p, q = _factors(columns.reshape(-1, part.a, part.b), next(starts))
                sent += [p.flatten(1), q.flatten(1)]
            else:
                sent.append(columns)
        return Sent(torch.cat(sent, 1))

    def _starts(self, draws: RowRandom, message: Message) -> Iterator[Tensor]:
        """Of each matrix, what its iteration starts from.  # [k, b, r]"""
        last, at = self.last[message.name][message.ids] if self._is_warm(message) else None, 0
        for part in self._parts(message):
            if part.r:
                start = 2 * draws.uniform(part.b, part.r) - 1
                if last is not None:
                    sent = last[:, at : at + part.b * part.r].reshape(start.shape)
                    start = torch.where((sent != 0).any(1, keepdim=True), sent, start)  # by column
                    at += part.b * part.r
                yield start

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """Products of the factors, and all other numbers.  # [k, n]"""
        pieces = self._pieces(sent, message)
        return torch.cat([_product(*piece).flatten(1) if len(piece) == 2 else piece[0] for piece in pieces], 1)

    def _pieces(self, sent: Sent, message: Message) -> list[tuple[Tensor, ...]]:
        """Of each part its factors [k, a, r] and [k, b, r], or its numbers."""
        parts = self._parts(message)
        split = sent.numbers.split([part.numbers for part in parts], 1)
        return [_halves(numbers, part) if part.r else (numbers,) for numbers, part in zip(split, parts)]

    def num_numbers(self, message: Message) -> int:
        """r (a + b) for each matrix, and one for each other number."""
        return sum(part.numbers for part in self._parts(message))

    def count(self, sent: Sent, message: Message) -> Tensor:
        """None: all that is sent are numbers.  # [k]"""
        return torch.zeros(len(sent.numbers), dtype=torch.int64, device=sent.numbers.device)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """Nothing but numbers."""

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Nothing but numbers."""
        return {}


def _halves(numbers: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    p, q = numbers.split([part.a * part.r, part.b * part.r], 1)
    return p.reshape(-1, part.a, part.r), q.reshape(-1, part.b, part.r)


def _factors(matrices: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """P [k, a, r] with orthonormal columns and Q [k, b, r], so that P Q' is the matrices' [k, a, b] projection on P.

    start [k, b, r].  Products are sums in one order (_sums.py): each costs some passes over the matrices.
    """
    scale = matrices.abs().amax((1, 2))[:, None, None]  # [k, 1, 1]
    scale = torch.where(scale > 0, scale, 1)
    unit = matrices / scale
    p = torch.stack([total(unit * v[:, None], 2) for v in start.unbind(2)], 2)  # [k, a, r]
    p = _orthonormal(p)
    q = torch.stack([total(unit * u[:, :, None], 1) for u in p.unbind(2)], 2)  # [k, b, r]
    return p, (q * scale).clamp(-LIMIT, LIMIT)


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram and Schmidt's columns [k, a, r], twice over; 0 for one that depends on those before."""
    found: list[Tensor] = []
    for column in columns.unbind(2):  # [k, a]
        left = column
        for _ in range(2):
            for other in found:
                left = left - total(other * left)[:, None] * other
        size = l2_norm(left)  # [k, 1]
        found.append(torch.where(size > DEPENDENT * l2_norm(column), left / size, 0))
    return torch.stack(found, 2)


def _product(p: Tensor, q: Tensor) -> Tensor:
    """p [k, a, r] times q [k, b, r], transposed.  # [k, a, b]"""
    pairs = zip(p.unbind(2), q.unbind(2))
    products = (u[:, :, None] * v[:, None] for u, v in pairs)
    whole = next(products)
    for product in products:
        whole = whole + product
    return whole
