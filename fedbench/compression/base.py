"""Base class of compressors, which encode rows of float32 as fewer float32 values, and codes of few bits.

A compressor implements five small functions.  `compress` encodes rows, `decompress` restores them, `count` returns the
bits of the encoding, and `write` and `read` convert the encoding of one row to a bit stream and back.  The base class
derives `__call__` (many clients at once) and `encode` and `decode` (one row) from these.

Letters: k clients, n values of a row, m values of an encoding that are transmitted as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.core.renamed import refuse_old_names
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore

Direction = Literal["up", "both"]
Span = tuple[int, int, tuple[int, ...]]  # a parameter's columns in the row, a to b, and its shape
FLOAT = 32  # bits of an uncompressed value
LIMIT = 2.0**100  # magnitude at which a row counts as diverged; below it, no norm and no product overflows
BLOCK = 1 << 22  # values that are compressed at once


@dataclass(frozen=True, eq=False)
class Message:
    """Description of a message without its content, which client and server have before the transmission.

    Attributes:
        name: Name that the method gave the message.
        size: Number n of values in a row.
        ids: Clients of the rows, [k]; empty for a row that is the same for all clients.
        spans: Parameters in a row of the model, in the order of their columns; empty for other rows.
        weights: Weight of each client in the server's mean, [k]; None for messages of the server.
        cohort: Weights of the whole cohort, [K]; None for messages of the server.
    """

    name: str
    size: int
    ids: np.ndarray
    spans: Mapping[str, Span] = field(default_factory=dict)
    weights: Tensor | None = None
    cohort: Tensor | None = None

    def of(self, a: int, b: int) -> Message:
        """Return a copy of this message for the clients ids[a:b] and their weights[a:b]; other fields stay the same."""
        return replace(self, ids=self.ids[a:b], weights=None if self.weights is None else self.weights[a:b])


@dataclass
class Encoded:
    """Encoding of k rows.

    Attributes:
        values: Values that are transmitted as float32, [k, m].
        codes: Other contents by name, [k, ...] each.
    """

    values: Tensor
    codes: dict[str, Tensor] = field(default_factory=dict)


OLD_NAMES = {
    "pack": "compress",
    "unpack": "decompress",
    "keep": "update_state",
    "num_numbers": "num_values",
    "leaves_numbers": "has_values",
    "contracts": "contractive",
    "chooses": "selects_positions",
    "reads_spans": "uses_shapes",
}


class Compressor:
    """Base class of compressors.  An encoding has float32 values, and codes: all else, such as positions.

    The result for a row depends only on the row, its key and its client's state, bit for bit and on any device.  Use
    the sums of _sums.py and the random numbers of RowRandom.  A row diverged if a value is not finite or is at least
    2^100 in magnitude.  Unless the compressor is exact, such a row has an empty stream and is received as NaN.

    Args:
        error_feedback: Whether clients add the residual of an upload to their next one (Stich et al., NeurIPS 2018).
            Applies to messages that accumulate; the channel implements it.
        direction: "up" compresses uploads, "both" downloads too.

    Attributes:
        exact: Whether rows are received unchanged.
        unbiased: Whether the expectation of a received row is the row.
        contractive: Whether a received row is never farther from the row than 0 is.  With error feedback, other
            compressors are scaled (_scaled.py).
        has_values: Whether the encoding has values, which the next compressor of a chain may compress.
        selects_positions: Whether it transmits only selected positions of a row.
        uses_shapes: Whether it uses the shapes of parameters.
    """

    exact = False
    unbiased = False
    contractive = False
    has_values = False
    selects_positions = False
    uses_shapes = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_old_names(cls, OLD_NAMES)

    def __init__(self, error_feedback: bool, direction: Direction):
        self.error_feedback = error_feedback
        self.direction: Direction = direction

    # -- to implement --------------------------------------------------------------------------------------
    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Encode rows, without changing them.

        Args:
            x: Finite rows.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            The encoding, with num_values(message) values per row.
        """
        raise NotImplementedError

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the rows that the receiver gets.

        Args:
            encoded: Result of `compress`, or what `read` and the float32 values of a stream gave.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            The rows, equal to those given to `compress` only if the compressor is lossless.  # [k, n]
        """
        raise NotImplementedError

    def num_values(self, message: Message) -> int:
        """Return m, the number of values of each row that are sent as float32; 0 unless overridden.

        These are the columns of `Encoded.values` [k, m].

        `message`, the description of what is sent, is unused.
        """
        return 0

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits that `write` takes for each row's codes, without its float32 values.

        Args:
            encoded: The encoding of k rows.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            The numbers of bits.  # [k] int64
        """
        raise NotImplementedError

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the codes of one row to a stream.

        `read` must find the end of the codes by itself, because the row's values follow in the same stream.

        Args:
            encoded: The encoding of one row (k = 1).
            out: The stream.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.
        """
        raise NotImplementedError

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote.

        Args:
            stream: The stream.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            The tensors of `Encoded.codes` by name, for decompression.  # [1, ...] each
        """
        raise NotImplementedError

    # -- state ---------------------------------------------------------------------------------------------
    def setup(self, rows: RowStore, message: Message) -> None:
        """Create the clients' states for all messages named message.name, before the first of them.

        It does nothing by default; compressors with a state implement it.

        Args:
            rows: rows(name, default) creates a tensor with one row for each client of the run.
            message: Description of these messages: name, size and parameters; message.ids is empty.
        """

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Update the states of the clients message.ids after a transmission.

        It does nothing by default; compressors with a state implement it, because `compress` must not change states.

        Args:
            encoded: The encoding that was transmitted.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.
        """

    @property
    def reads_losses(self) -> bool:
        """Whether the compressor implements `observe`; clients then upload their training losses in each round."""
        return type(self).observe is not Compressor.observe

    def observe(self, losses: Tensor) -> None:
        """Adapt to the training losses [K] of the round's clients after each round.  The default does nothing."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all attributes that are tensors, by name, for a checkpoint.

        The clients' states that `setup` created are not among them: the row store saves them.
        """
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the attributes from the dict that `state_dict` returned.

        Args:
            state: Tensors by attribute name.  Each moves to the device of the attribute that it replaces.
        """
        for name, value in state.items():
            current = getattr(self, name, None)
            setattr(self, name, value.to(current.device) if isinstance(current, Tensor) else value)

    # -- derived functions ---------------------------------------------------------------------------------
    def __call__(
        self, x: Tensor, draws: RowRandom, message: Message, changes_state: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Transmit rows.  No operation synchronizes with the device.

        Args:
            x: Rows.  # [k, n] float32
            draws: Random numbers, one key per client and message.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.
            changes_state: Whether the clients' states are updated.

        Returns:
            Rows as they are received [k, n], and the bits of each [k] int64.

        Raises:
            ValueError: x has another shape or type.
        """
        _check(x, message)
        if self.exact or not message.size:  # sent as float32
            return x, torch.full((len(x),), FLOAT * message.size, device=x.device)
        received, bits = torch.empty_like(x), torch.empty(len(x), dtype=torch.int64, device=x.device)
        size, calls = max(1, BLOCK // message.size), draws.calls  # rows in a block; draws made so far
        for a in range(0, len(x), size):
            block = slice(a, a + size)
            block_draws = RowRandom(draws.keys[block])
            block_draws.calls = calls  # every block continues with the same draws of its rows
            received[block], bits[block] = self._block(x[block], block_draws, message.of(a, a + size), changes_state)
            draws.calls = block_draws.calls
        return received, bits

    def _block(self, x: Tensor, draws: RowRandom, message: Message, changes_state: bool) -> tuple[Tensor, Tensor]:
        """Transmit a block of rows that are encoded at once.  A row that diverged is received as NaN, with 0 bits.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.
            changes_state: Whether the compressor's states of the clients are updated.

        Returns:
            The rows that the receiver gets [k, n], and the number of bits of each row [k].
        """
        is_valid = (x.abs() < LIMIT).all(1)  # LIMIT is 2^100; False for NaN  [k]
        encoded = self.compress(torch.where(is_valid[:, None], x, 0), draws, message)
        received = self.decompress(encoded, message)
        bits = self.count(encoded, message) + FLOAT * self.num_values(message)  # codes, and values of 32 bits
        if changes_state:
            self.update_state(encoded, message)
        return torch.where(is_valid[:, None], received, torch.nan), torch.where(is_valid, bits, 0)

    def encode(self, x: Tensor, draws: RowRandom, message: Message) -> bytes:
        """Return the bit stream of one client's row, without changing the client's state.

        Args:
            x: The row.  # [n]
            draws: Random numbers with the client's key only.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            The stream; empty for a row that diverged.
        """
        out = Writer()
        if self.exact or not message.size:  # sent as float32
            out.floats(x)
        elif bool((x.abs() < LIMIT).all()):  # no value is so large (2^100) or NaN that the row counts as diverged
            encoded = self.compress(x[None], draws, message)  # of one row
            self.write(encoded, out, message)  # the codes, such as positions
            out.floats(encoded.values[0])  # the values that remain float32, if any
        return out.stream()

    def decode(self, stream: bytes, message: Message) -> Tensor:
        """Return the row that a stream encodes, as the receiver gets it.

        Args:
            stream: Output of `encode`.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            The row; NaN for an empty stream, which stands for a row that diverged.  # [n]
        """
        if not stream:
            return torch.full((message.size,), torch.nan)
        reader = Reader(stream)
        if self.exact:  # rows are sent as float32
            return reader.floats(message.size)
        codes = self.read(reader, message)
        return self.decompress(Encoded(reader.floats(self.num_values(message))[None], codes), message)[0]


def _check(x: Tensor, message: Message) -> None:
    """Raise ValueError unless x is a float32 tensor [k, n] with n = message.size."""
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != message.size:
        shape: Any = tuple(x.shape)
        raise ValueError(
            f"the message {message.name} must be float32 [k, {message.size}], a row for each of k clients, got "
            f"{x.dtype} {shape}; convert the argument x, or pass a message of this size"
        )
