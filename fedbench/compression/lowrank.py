"""Low rank: every parameter matrix is approximated by a product of low-rank factors, by one power iteration.

Vogels, Karimireddy and Jaggi, NeurIPS 2019 (PowerSGD), Algorithm 1.  A convolution [o, i, h, w] is a matrix [o, i h w].
Vectors, and matrices whose factors are not smaller, are transmitted uncompressed.
Departs from the paper: the initial factor is drawn for every message, unless warm_start uses the last result; every
client has its own factors, while the paper averages factors over clients during the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression._sums import l2_norm, total
from fedbench.compression.base import LIMIT, Compressor, Direction, Encoded, Message
from fedbench.core.options import Count
from fedbench.core.rng import RowRandom
from fedbench.core.rows import Rows, RowStore

DEPENDENT = 1e-5  # a column whose orthogonal remainder is below this fraction of its norm counts as dependent


class _Part(NamedTuple):
    """Columns begin to end of a row: a matrix [a, b] with factors of rank r, or uncompressed values (r = 0)."""

    begin: int
    end: int
    a: int = 0
    b: int = 0
    r: int = 0

    @property
    def values(self) -> int:
        """Number of transmitted float32 values: r (a + b) for two factors, end - begin without factors (r = 0)."""
        return self.r * (self.a + self.b) if self.r else self.end - self.begin


class LowRank(Compressor):
    """Low-rank approximation of parameter matrices.  last: by name of a message, the last factors Q of each client.

    Args:
        rank: Rank r of the factors.
        warm_start: Whether the power iteration starts from the client's last factors.
        error_feedback: Whether clients add the residual of an upload to their next one.
        direction: "up", or "both" to compress downloads too.

    State:
        last: Last second factors for each name of a message, [N, sum of b r]; 0 before a client's first message.
    """

    contractive = True
    has_values = False  # a chain could not compress them by one scale: P is below 1, Q and vectors scale with the row
    uses_shapes = True

    def __init__(
        self, rank: Count = 2, warm_start: bool = False, error_feedback: bool = True, direction: Direction = "up"
    ):
        super().__init__(error_feedback, direction)
        self.rank, self.warm_start = rank, warm_start
        self.last: dict[str, Rows] = {}

    def setup(self, rows: RowStore, message: Message) -> None:
        """Create `last[message.name]`, one row of factors Q for each client of the run, at first 0.

        Do nothing without warm_start=true, or if no matrix of the message has factors.

        Args:
            rows: Creates tensors with one row for each client.
            message: Description of these messages: name, size and parameters.
        """
        size = sum(part.b * part.r for part in self._parts(message))
        if self.warm_start and size:
            self.last[message.name] = rows(f"compression/{message.name}", torch.zeros(size))

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Store the factors Q of the clients message.ids, from which their next power iterations start.

        Do nothing without warm_start=true.

        Args:
            encoded: The encoding that was transmitted.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.
        """
        if self._is_warm(message):  # the factors of this message are stored
            # the second factor, Q, of each matrix; other parts are tuples of one tensor
            second = [piece[1].flatten(1) for piece in self._pieces(encoded, message) if len(piece) == 2]
            self.last[message.name][message.ids] = torch.cat(second, 1)

    def _is_warm(self, message: Message) -> bool:
        """Return whether `self.last` has factors for the clients of this message, which are 0 before their first one.

        False with warm_start=false, for a broadcast, which has no clients, and for messages without matrices.
        """
        return self.warm_start and message.name in self.last and len(message.ids) > 0

    def _parts(self, message: Message) -> list[_Part]:
        """Split a row into parameter matrices that low-rank factors make smaller, and the columns between them.

        Args:
            message: Description of what is sent, with the columns and shapes of the parameters in a row.

        Returns:
            The parts, in the order of the columns.
        """
        parts, done = [], 0  # done: the columns up to the end of the last matrix are in a part
        for begin, end, shape in message.spans.values():
            a = shape[0] if len(shape) > 1 else 1  # rows of the matrix; a vector has one
            b = (end - begin) // max(a, 1)  # columns of the matrix
            r = min(self.rank, a, b)
            if r * (a + b) < a * b:  # the factors are smaller than the matrix
                parts += [_Part(done, begin), _Part(begin, end, a, b, r)]  # the columns before, and the matrix
                done = end
        return [p for p in [*parts, _Part(done, message.size)] if p.begin < p.end]

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Return both factors of each matrix, and all other values.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers of each client, for the first factors.
            message: Description of what is sent, with the columns and shapes of the parameters in a row.

        Returns:
            The factors and values of each client, as one row of m < n numbers.  # [k, m]
        """
        values, starts = [], self._starts(draws, message)  # starts: initial factors of the power iterations
        for part in self._parts(message):
            columns = x[:, part.begin : part.end]
            if part.r:  # a matrix with factors of rank r; 0: no matrix, or one that factors would not shorten
                p, q = _factors(columns.reshape(-1, part.a, part.b), next(starts))
                values += [p.flatten(1), q.flatten(1)]
            else:
                values.append(columns)
        return Encoded(torch.cat(values, 1))

    def _starts(self, draws: RowRandom, message: Message) -> Iterator[Tensor]:
        """Yield for each matrix the factors Q from which its power iteration starts.

        They are the client's last ones, or random without these.  Columns of 0 are replaced by random ones.

        Args:
            draws: Random numbers, one key per row.
            message: Description of what is sent, with the parameters in a row, and the clients.

        Yields:
            The factors of the k clients.  # [k, b, r]
        """
        # _is_warm: whether the clients' last factors are stored
        # last: the factors of all matrices, one after the other  [k, ...]; offset: where those of the next one begin
        last, offset = self.last[message.name][message.ids] if self._is_warm(message) else None, 0
        for part in self._parts(message):
            if part.r:
                start = 2 * draws.uniform(part.b, part.r) - 1  # from -1 to 1  [k, b, r]
                if last is not None:
                    factor = last[:, offset : offset + part.b * part.r].reshape(start.shape)
                    start = torch.where((factor != 0).any(1, keepdim=True), factor, start)  # random for columns of 0
                    offset += part.b * part.r
                yield start

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the rows that the receiver gets.

        Args:
            encoded: Values [k, m]: for each matrix its factors P and Q, and all other values of the rows.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            The rows, with the product of P and the transposed Q for each matrix, and other values unchanged.  # [k, n]
        """
        pieces = self._pieces(encoded, message)  # two tensors, P and Q, of a matrix; else one, the values
        return torch.cat([_product(*piece).flatten(1) if len(piece) == 2 else piece[0] for piece in pieces], 1)

    def _pieces(self, encoded: Encoded, message: Message) -> list[tuple[Tensor, ...]]:
        """Split the transmitted values [k, m] into those of each part of the row (`_parts`).

        Args:
            encoded: The encoding.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            For each part, (P [k, a, r], Q [k, b, r]) of a matrix, or (values [k, columns],) if it is uncompressed.
        """
        parts = self._parts(message)
        split = encoded.values.split([part.values for part in parts], 1)  # values of each part  [k, values] each
        # r: the rank of a matrix; 0 for a part that is not compressed
        return [_halves(values, part) if part.r else (values,) for values, part in zip(split, parts)]

    def num_values(self, message: Message) -> int:
        """Return m, the number of float32 values in the encoding of a row.

        They are r (a + b) for each matrix [a, b] that has factors of rank r, and all other values of the row.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        return sum(part.values for part in self._parts(message))

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's codes: 0, because the factors are sent as float32 values.  # [k] int64"""
        return torch.zeros(len(encoded.values), dtype=torch.int64, device=encoded.values.device)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write nothing: there are no codes, because the factors are sent as float32 values.

        `message`, the description of what is sent, is unused.
        """

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Return {}: there are no codes, because the factors are sent as float32 values.

        `message`, the description of what is sent, is unused.
        """
        return {}


def _halves(values: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    """Split the transmitted values [k, r (a + b)] of a matrix `part` into its factors (P [k, a, r], Q [k, b, r])."""
    p, q = values.split([part.a * part.r, part.b * part.r], 1)
    return p.reshape(-1, part.a, part.r), q.reshape(-1, part.b, part.r)


def _factors(matrices: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors P and Q of matrices by one power iteration: P Q' is the projection of a matrix onto P's span.

    Products are sums in a fixed order (_sums.py), so the factors do not depend on the device.

    Args:
        matrices: The matrices.  # [k, a, b]
        start: Factors from which the iteration starts.  # [k, b, r]

    Returns:
        P [k, a, r] with orthonormal columns, and Q [k, b, r].
    """
    scale = matrices.abs().amax((1, 2))[:, None, None]  # [k, 1, 1]
    scale = torch.where(scale > 0, scale, 1)  # matrices are scaled to entries of at most 1, against overflow
    unit = matrices / scale
    p = torch.stack([total(unit * v[:, None], 2) for v in start.unbind(2)], 2)  # matrix times start  [k, a, r]
    p = _orthonormal(p)
    q = torch.stack([total(unit * u[:, :, None], 1) for u in p.unbind(2)], 2)  # transposed matrix times P  [k, b, r]
    return p, (q * scale).clamp(-LIMIT, LIMIT)  # LIMIT: beyond it a row counts as diverged


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormalize columns [k, a, r] by Gram-Schmidt; a column that depends on those before it becomes 0.

    # [k, a, r]
    """
    basis: list[Tensor] = []
    for column in columns.unbind(2):  # [k, a]
        remainder = column
        for _ in range(2):  # the second pass removes what rounding left
            for other in basis:
                remainder = remainder - total(other * remainder)[:, None] * other
        size = l2_norm(remainder)  # at most DEPENDENT = 1e-5 times |column| if it is only rounding errors  [k, 1]
        basis.append(torch.where(size > DEPENDENT * l2_norm(column), remainder / size, 0))
    return torch.stack(basis, 2)


def _product(p: Tensor, q: Tensor) -> Tensor:
    """Return products of p [k, a, r] and the transposed q [k, b, r], summed over r in a fixed order.  # [k, a, b]"""
    pairs = zip(p.unbind(2), q.unbind(2))  # columns of both factors
    products = (u[:, :, None] * v[:, None] for u, v in pairs)  # matrices of rank 1, which are added one by one
    result = next(products)
    for product in products:
        result = result + product
    return result
