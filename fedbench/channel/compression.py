"""Compression of messages with error feedback.

Uplink: a client sends its value minus the reference, plus the residual of its last upload (Stich et al., NeurIPS
2018).  The server adds what it receives to the reference.
Downlink (direction="both"): the server sends its value minus the version that the client has, which the server stores
(Richtarik et al., NeurIPS 2021).  A broadcast is one message for all.  A client that missed broadcasts also receives
those, or the whole row if that takes fewer bytes.
With error feedback, a compressor C that is not contractive (|C(x) - x| < |x| in expectation) is scaled, so that the
residuals do not grow (compression/_scaled.py).

Integers, tensors of fewer than TINY values and running statistics are sent uncompressed.

Letters: K clients of the cohort, N clients of the federation, n values of a message.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._scaled import contractive
from fedbench.compression.base import FLOAT, Compressor, Message
from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import Rows, RowStore
from fedbench.nn.flat import FlatModel
from fedbench.nn.row_layout import MessageLayout

TINY = 128  # smaller messages (votes, losses, label counts) are not compressed
NO_CLIENTS = np.empty(0, np.int64)
SERVER = np.zeros(1, np.int64)  # the only row of a server state


class Received(NamedTuple):
    """A message as it is received.

    Attributes:
        value: Received tensor, in the shape of the original.
        num_bytes: Bytes of all clients together.
    """

    value: Tensor
    num_bytes: int


class Compression:
    """Compresses all messages of a run by `compressor`, or by `contractive`, which scales it: |C(x) - x| <= |x|.

    Its state is in row stores of these names, below compression/:
        up/<name>/memory: Residual of each client.  # [N, n]
        down/<name>/reference: Version that each client has [N, n], or that all have of a broadcast [1, n].
        down/<name>/bits: Bits of all broadcasts so far.  # [1, 1]
        down/<name>/heard: Value of bits at each client's last broadcast.  # [N, 1]

    Args:
        compressor: Compresses rows.
        rows: Creates the row stores.
        model: Defines the parameters of a row.
        seed: The run's seed.

    Attributes:
        acted: Whether any message was large enough for the compressor, even if the compressor is exact.
    """

    def __init__(self, compressor: Compressor, rows: RowStore, model: FlatModel, seed: int):
        self.compressor, self.rows, self.model, self.seed = compressor, rows, model, seed
        self.contractive = contractive(compressor)
        self.acted = False
        self._is_set_up: set[str] = set()
        self._layout = functools.cache(model.message_layout)

    @property
    def compresses_downloads(self) -> bool:
        """Whether downloads are compressed too: compression.direction is "both", and the compressor is not exact."""
        return self.compressor.direction == "both" and not self.compressor.exact

    def upload(
        self, context: RoundContext, name: str, value: Tensor, reference: Tensor | None, call: int, accumulates: bool
    ) -> Received:
        """Compress an upload: its difference to the reference, plus what earlier uploads of the client omitted.

        Args:
            context: The clients.
            name: Name of the message.
            value: A row for each client.  # [K, ...]
            reference: The tensor that both sides have, [...] or [K, ...].  None: 0.
            call: The number of earlier uploads by this name in this round.
            accumulates: Whether the residual is added to the client's next upload.  Otherwise the next upload replaces
                this one, and makes up for its residual.

        Returns:
            The upload that the server receives [K, ...], and its bytes.
        """
        if self._is_uncompressed(value):
            return Received(value, num_bytes(value))
        path, x = _state_path("up", name, call), value.reshape(len(value), -1)  # path: of the stored state; [K, n]
        base = 0.0 if reference is None else reference.expand_as(value).reshape(x.shape)  # the server has it
        residual = x - base  # what remains to be sent
        has_feedback = accumulates and self.compressor.error_feedback  # else no residual is stored
        residuals = self._residuals(path, context, x.shape[1]) if has_feedback else None
        if residuals is not None:
            residual = residual + residuals[context.ids]  # plus what earlier uploads omitted
        # A later upload repairs this one: by error feedback, or because it replaces it.  For this to converge, the
        # compressor must be contractive: what it omits is smaller than the row.
        is_repaired = residuals is not None or (reference is not None and not accumulates)
        message = self._describe(path, name, x.shape[1], context)
        keys = self._random_keys(path, context, context.ids)
        compressor = self.contractive if is_repaired else self.compressor
        decompressed, bits = self._compress_and_decompress(compressor, residual, message, keys)
        if residuals is not None:
            residuals[context.ids] = residual - decompressed
        return Received(self._with_running_statistics(base + decompressed, x).view(value.shape), in_bytes(bits))

    def broadcast(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress one tensor for all clients.

        In an evaluation (context.changes_state is False) the state does not change, and no bytes are counted.

        Args:
            context: The clients.
            name: Name of the message.
            value: The tensor.  # [...]
            call: The number of earlier broadcasts by this name in this round.

        Returns:
            The tensor that all clients receive [...], and the bytes of all clients together.
        """
        if not self.compresses_downloads or self._is_uncompressed(value[None]):
            return Received(value, len(context) * num_bytes(value))
        path, x = _state_path("down", name, call), value.reshape(1, -1)  # path: of the stored state; [1, n]
        # what all clients have: a state of a single row, whose id is SERVER  [1, n]
        last = self._row_store(f"{path}/reference", torch.zeros_like(x[0]), count=1)
        if last.used:  # there was a broadcast before: only the difference is sent
            message = self._describe(path, name, x.shape[1], context=None)
            received, bits = self._send_difference(context, x, last[SERVER], message, SERVER)
        else:
            # the first broadcast is sent whole, with FLOAT = 32 bits for each number
            received, bits = x, torch.full((1,), FLOAT * x.shape[1], device=x.device)
        if not context.changes_state:  # an evaluation, whose bytes are not counted
            return Received(received.view(value.shape), num_bytes=0)
        last[SERVER] = received
        missed = self._bits_missed(path, context, bits, x.shape[1])  # also of broadcasts while a client was away  [K]
        return Received(received.view(value.shape), in_bytes(missed))

    def _bits_missed(self, path: str, context: RoundContext, bits: Tensor, size: int) -> Tensor:
        """Return the bits that each client is sent with a broadcast, and record it.

        A client is sent all broadcasts since its last one, or the uncompressed row if that takes fewer bits.

        Args:
            path: Name below which its counts of bits are stored, such as "down/w".
            context: The clients.
            bits: Bits of this broadcast.  # [1]
            size: Length of the row.

        Returns:
            The bits.  # [K]
        """
        # bits of all broadcasts so far, in the single row SERVER  [1, 1]
        total_bits = self._row_store(f"{path}/bits", torch.zeros_like(bits), count=1)
        # that number at each client's last broadcast
        last_bits = self._row_store(f"{path}/heard", torch.zeros_like(bits))  # [N, 1]
        now = total_bits[SERVER] + bits  # including this broadcast  [1, 1]
        uncompressed = torch.full_like(bits, FLOAT * size)  # also for clients without an earlier broadcast  [1]
        missed = torch.where(last_bits.has(context.ids), (now - last_bits[context.ids])[:, 0], uncompressed)
        total_bits[SERVER], last_bits[context.ids] = now, now.expand(len(context), 1)
        return missed.minimum(uncompressed)

    def download(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress a row for each client.  In an evaluation (context.changes_state is False) the state does not change.

        Args:
            context: The clients.
            name: Name of the message.
            value: A row for each client.  # [K, ...]
            call: The number of earlier downloads by this name in this round.

        Returns:
            The rows that the clients receive [K, ...], and their bytes.
        """
        if not self.compresses_downloads or self._is_uncompressed(value):
            return Received(value, num_bytes(value))
        path, x = _state_path("down", name, call), value.reshape(len(value), -1)  # path: of the stored state; [K, n]
        last = self._row_store(f"{path}/reference", torch.zeros_like(x[0]))  # what each client has  [N, n]
        message = self._describe(path, name, x.shape[1], context, weighted=False)
        has_version = last.has(context.ids)  # [K]
        received, bits = self._send_difference(context, x, last[context.ids], message, context.ids)
        # the first time the whole row, with FLOAT = 32 bits for each number
        received = torch.where(has_version[:, None], received, x)
        bits = torch.where(has_version, bits, FLOAT * x.shape[1])
        if context.changes_state:
            last[context.ids] = received
        return Received(received.view(value.shape), in_bytes(bits))

    def _send_difference(
        self, context: RoundContext, x: Tensor, last: Tensor, message: Message, ids: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Send the difference between rows and the last versions that the receivers have.

        Args:
            context: The clients of the round.
            x: The rows.  # [k, n]
            last: The last versions.  # [k, n]
            message: Describes the rows.
            ids: The client of each row, for its random numbers; SERVER for a broadcast.  # [k]

        Returns:
            The rows that are received [k, n], and the bits of each [k].
        """
        keys, keep = self._random_keys(message.name, context, ids), context.changes_state
        # the next difference repairs this one, if the compressor is contractive: what it omits is smaller than the row
        decompressed, bits = self._compress_and_decompress(self.contractive, x - last, message, keys, keep)
        return self._with_running_statistics(last + decompressed, x), bits

    def observe(self, losses: Tensor) -> int:
        """Pass the clients' training losses [K] to the compressor, and return the bytes of their upload.

        A compressor that does not read losses gets none, at no cost.
        """
        if not self.compressor.reads_losses:
            return 0
        self.compressor.observe(losses)
        return num_bytes(losses)

    def _is_uncompressed(self, value: Tensor) -> bool:
        """Return whether rows [K, ...] are sent uncompressed.

        These are rows of another type than float32, such as integers; rows of fewer than TINY = 128 values; and all
        rows if the compressor is exact, so that rows arrive unchanged.  Larger float32 rows set `acted`: some message
        was large enough for the compressor.
        """
        if value.dtype != torch.float32 or math.prod(value.shape[1:]) < TINY:
            return True
        self.acted = True
        return self.compressor.exact

    def _compress_and_decompress(
        self, compressor: Compressor, rows: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compress and decompress rows.  Running statistics, which follow the parameters, stay uncompressed.

        Args:
            compressor: The compressor.
            rows: The rows.  # [k, n]
            message: Describes the rows.
            keys: The key of each row's random numbers.  # [k] int64
            keep: Whether the compressor may change its state.

        Returns:
            The decompressed rows [k, n], and the bits of each [k].
        """
        num_parameters = message.size  # columns before the running statistics
        decompressed, bits = compressor(rows[:, :num_parameters].contiguous(), rng.RowRandom(keys), message, keep)
        if num_parameters == rows.shape[1]:
            return decompressed, bits
        rest = rows[:, num_parameters:]
        return torch.cat([decompressed, rest], 1), bits + FLOAT * rest.shape[1]  # FLOAT: 32 bits for each number

    def _with_running_statistics(self, received: Tensor, x: Tensor) -> Tensor:
        """Copy the running statistics of x into received, because reference plus difference would round them.

        Args:
            received: The rows that are received, which are changed in place.  # [k, n]
            x: The rows that are sent.  # [k, n]

        Returns:
            received.
        """
        layout = self._layout(x.shape[1])  # where parameters end and statistics begin; None if there are no statistics
        if layout is not None and layout.parameters < x.shape[1]:
            received[:, layout.parameters :] = x[:, layout.parameters :]
        return received

    def _describe(
        self, path: str, name: str, size: int, context: RoundContext | None, weighted: bool = True
    ) -> Message:
        """Describe a message.

        Args:
            path: Name below which its residuals and versions are stored, such as "up/theta".
            name: Name that the method gave it, such as "theta".
            size: Number of values of a row, n.
            context: The clients; None for a row that is the same for all.
            weighted: Whether the server takes a mean of the rows, so that the message has the clients' weights.

        Returns:
            The description that a compressor needs.  Its size is that of the parameters, without running statistics.

        Raises:
            RunError: Running statistics may be anywhere in the message.
        """
        layout = self._layout(size)  # where parameters end in a tensor of this size; None if unknown
        if layout is None:
            if self.model.buffer_names:
                raise RunError(
                    f"compression: the message {name!r} of {size:,} values is neither a whole model nor a group of "
                    "model.columns, so it may include BatchNorm's running statistics, which must not be compressed. "
                    "Use a model without them, for example with model.norm=group, or compression=none"
                )
            layout = MessageLayout({}, size)  # all values are parameters, whose names and shapes are unknown
        ids = NO_CLIENTS if context is None else context.ids  # a broadcast has no clients of its own
        weights = None if context is None or not weighted else context.mean_weights
        # ids and weights of the rows; cohort: weights of all clients of the round
        message = Message(path, layout.parameters, ids, layout.spans, weights=weights, cohort=weights)
        if path not in self._is_set_up:  # the first message of this name creates the compressor's states
            self.compressor.setup(self.rows, message.of(0, 0))  # without clients
            self._is_set_up.add(path)
        return message

    def _residuals(self, path: str, context: RoundContext, size: int) -> Rows:
        """Return the row store [N, n] of an upload's residuals: what a client's earlier uploads omitted, first 0.

        Args:
            path: The path of the upload's states, such as "up/theta".
            context: Its device is that of the residuals.
            size: Number of values of a client's upload, n.
        """
        return self._row_store(f"{path}/memory", torch.zeros(size, device=context.device))

    def _row_store(self, path: str, default: Tensor, count: int | None = None) -> Rows:
        """Return the row store of a state.  The first time, create it.

        Args:
            path: Name of the state, below compression/.
            default: The initial value of each row.
            count: The number of rows.  None: N.

        Raises:
            RunError: Rows of another length are stored by this name.
        """
        name = f"compression/{path}"  # path: up or down, then the name that the method gave the message
        rows = self.rows.all[name] if name in self.rows.all else self.rows(name, default, count)
        if rows.default.shape != default.shape:
            raise RunError(
                f"compression: the message {path.split('/')[1]!r} has {default.numel():,} values, but earlier ones of "
                f"this name had {rows.default.numel():,}, as have the residuals or versions stored for it. In the "
                "method, use another name for messages of another length, or pass previous=... to upload"
            )
        return rows

    def _random_keys(self, path: str, context: RoundContext, ids: np.ndarray) -> Tensor:
        """Return the key of each client's random numbers for a message.

        Args:
            path: Name below which states of the message are stored, such as "up/theta"; a part of the keys.
            context: The round, which is part of the keys.
            ids: The clients; SERVER for a broadcast.  # [k]

        Returns:
            The keys, on the compute device.  # [k] int64
        """
        base = rng.key(self.seed, "compression", path, context.mode, context.round)
        return torch.from_numpy(rng.client_keys(base, ids)).to(context.device)


def _state_path(direction: str, name: str, call: int) -> str:
    """Return the name of a message's state: "up/NAME" for its first message in a round, "up/NAME/1" for the second.

    Args:
        direction: "up" or "down".
        name: Name that the method gave the message.
        call: How many messages of this name the round had before.
    """
    return f"{direction}/{name}/{call}" if call else f"{direction}/{name}"


def num_bytes(t: Tensor) -> int:
    """Return the number of bytes of a tensor's values, which is its size as an uncompressed message."""
    return t.numel() * t.element_size()


def in_bytes(bits: Tensor) -> int:
    """Return the total bytes of k bit streams of `bits` [k] bits each, each rounded up to whole bytes."""
    return int((bits + 7).div(8, rounding_mode="floor").sum())
