"""Compression of messages with error feedback.

Uplink: a client sends its value minus the reference, plus the residual of its last upload (Stich et al., NeurIPS
2018).  The server adds what it receives to the reference.
Downlink (direction="both"): the server sends its value minus the version that the client has, which the server stores
(Richtarik et al., NeurIPS 2021).  A broadcast is one message for all.  A client that missed broadcasts also receives
those, or the whole row if that takes fewer bytes.
With error feedback, a compressor that is not contractive is scaled (compression/_scaled.py).

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
    """Compresses all messages of a run.

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
        """Whether downloads are compressed too."""
        return self.compressor.direction == "both" and not self.compressor.exact

    def upload(
        self, context: RoundContext, name: str, value: Tensor, reference: Tensor | None, call: int, accumulates: bool
    ) -> Received:
        """Compress an upload.

        Args:
            context: The clients.
            name: Name of the message.
            value: A row for each client.  # [K, ...]
            reference: The tensor that both sides have, [...] or [K, ...].  None: 0.
            call: Earlier uploads by this name in this round.
            accumulates: Whether the residual is added to the client's next upload.  Otherwise the next upload replaces
                this one, and makes up for its residual.
        """
        if self._passes(value):
            return Received(value, num_bytes(value))
        path, x = _path("up", name, call), value.reshape(len(value), -1)  # [K, n]
        before = 0.0 if reference is None else reference.expand_as(value).reshape(x.shape)
        residual = x - before
        has_feedback = accumulates and self.compressor.error_feedback
        residuals = self._residuals(path, context, x.shape[1]) if has_feedback else None
        if residuals is not None:
            residual = residual + residuals[context.ids]
        # A later upload repairs this one: by error feedback, or because it replaces it.
        is_repaired = residuals is not None or (reference is not None and not accumulates)
        message, keys = self._message(path, name, x.shape[1], context), self._keys(path, context, context.ids)
        decompressed, bits = self._send(self.contractive if is_repaired else self.compressor, residual, message, keys)
        if residuals is not None:
            residuals[context.ids] = residual - decompressed
        return Received(self._with_running_statistics(before + decompressed, x).view(value.shape), in_bytes(bits))

    def broadcast(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress one value [...] for all clients.  An evaluation leaves the state unchanged."""
        if not self.compresses_downloads or self._passes(value[None]):
            return Received(value, len(context) * num_bytes(value))
        path, x = _path("down", name, call), value.reshape(1, -1)  # [1, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]), 1)
        if last.used:
            message = self._message(path, name, x.shape[1], None)
            received, bits = self._difference(context, x, last[SERVER], message, SERVER)
        else:
            received, bits = x, torch.full((1,), FLOAT * x.shape[1], device=x.device)
        if not context.changes_state:
            return Received(received.view(value.shape), 0)
        last[SERVER] = received
        return Received(received.view(value.shape), in_bytes(self._bits_missed(path, context, bits, x.shape[1])))

    def _bits_missed(self, path: str, context: RoundContext, bits: Tensor, size: int) -> Tensor:
        """Return the bits that each client is sent with a broadcast of bits [1].  # [K]

        These are the broadcasts since its last one, or the row itself, of size numbers, if that is less.
        """
        in_all = self._rows(f"{path}/bits", torch.zeros_like(bits), 1)
        last_bits = self._rows(f"{path}/heard", torch.zeros_like(bits))  # [N, 1]
        now, whole = in_all[SERVER] + bits, torch.full_like(bits, FLOAT * size)  # [1, 1], [1]
        missed = torch.where(last_bits.has(context.ids), (now - last_bits[context.ids])[:, 0], whole)
        in_all[SERVER], last_bits[context.ids] = now, now.expand(len(context), 1)
        return missed.minimum(whole)

    def download(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress a row for each client [K, ...].  An evaluation leaves the state unchanged."""
        if not self.compresses_downloads or self._passes(value):
            return Received(value, num_bytes(value))
        path, x = _path("down", name, call), value.reshape(len(value), -1)  # [K, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]))
        message = self._message(path, name, x.shape[1], context, weighted=False)
        has_version = last.has(context.ids)  # [K]
        received, bits = self._difference(context, x, last[context.ids], message, context.ids)
        received = torch.where(has_version[:, None], received, x)  # the first time the whole row
        bits = torch.where(has_version, bits, FLOAT * x.shape[1])
        if context.changes_state:
            last[context.ids] = received
        return Received(received.view(value.shape), in_bytes(bits))

    def _difference(
        self, context: RoundContext, x: Tensor, before: Tensor, message: Message, ids: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Send rows x minus the rows before [k, n].  Return the rows that are received [k, n] and the bits [k]."""
        keys, keep = self._keys(message.name, context, ids), context.changes_state
        decompressed, bits = self._send(self.contractive, x - before, message, keys, keep)
        return self._with_running_statistics(before + decompressed, x), bits

    def observe(self, losses: Tensor) -> int:
        """Pass the clients' training losses [K] to the compressor, and return the bytes of their upload."""
        if not self.compressor.reads_losses:
            return 0
        self.compressor.observe(losses)
        return num_bytes(losses)

    def _passes(self, value: Tensor) -> bool:
        """Return whether value [K, ...] is sent uncompressed."""
        if value.dtype != torch.float32 or math.prod(value.shape[1:]) < TINY:
            return True
        self.acted = True
        return self.compressor.exact

    def _send(
        self, compressor: Compressor, rows: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compress rows [k, n].  Running statistics, which follow the parameters, stay uncompressed."""
        num_parameters = message.size
        decompressed, bits = compressor(rows[:, :num_parameters].contiguous(), rng.RowRandom(keys), message, keep)
        if num_parameters == rows.shape[1]:
            return decompressed, bits
        rest = rows[:, num_parameters:]
        return torch.cat([decompressed, rest], 1), bits + FLOAT * rest.shape[1]

    def _with_running_statistics(self, received: Tensor, x: Tensor) -> Tensor:
        """Copy the running statistics of x into received [k, n], because reference plus difference would round them."""
        layout = self._layout(x.shape[1])
        if layout is not None and layout.parameters < x.shape[1]:
            received[:, layout.parameters :] = x[:, layout.parameters :]
        return received

    def _message(self, path: str, name: str, size: int, context: RoundContext | None, weighted: bool = True) -> Message:
        """Describe a message.

        Args:
            path: Name of its state.
            name: Name that the method gave it.
            size: n.
            context: The clients; None for a row that is the same for all.
            weighted: Whether the server takes a mean of the rows.

        Raises:
            RunError: Running statistics may be anywhere in the message.
        """
        layout = self._layout(size)
        if layout is None:
            if self.model.buffer_names:
                raise RunError(
                    f"compression: message {name!r} of {size:,} values is neither a row of the model nor one of its "
                    "column groups, so it may include BatchNorm's running statistics, which must not be compressed. "
                    "Use a model without them, for example with model.norm=group"
                )
            layout = MessageLayout({}, size)
        ids = NO_CLIENTS if context is None else context.ids
        weights = None if context is None or not weighted else context.mean_weights
        message = Message(path, layout.parameters, ids, layout.spans, weights, weights)
        if path not in self._is_set_up:
            self.compressor.setup(self.rows, message.of(0, 0))
            self._is_set_up.add(path)
        return message

    def _residuals(self, path: str, context: RoundContext, size: int) -> Rows:
        """Return the residuals of all clients.  # [N, n]"""
        return self._rows(f"{path}/memory", torch.zeros(size, device=context.device))

    def _rows(self, path: str, default: Tensor, count: int | None = None) -> Rows:
        name = f"compression/{path}"
        rows = self.rows.all[name] if name in self.rows.all else self.rows(name, default, count)
        if rows.default.shape != default.shape:
            raise RunError(
                f"compression: message {path.split('/')[1]!r} has {default.numel():,} values, and had "
                f"{rows.default.numel():,} before, for which state is stored. Use another name for it, or declare an "
                "upload in previous"
            )
        return rows

    def _keys(self, path: str, context: RoundContext, ids: np.ndarray) -> Tensor:
        """Return a key of each client's draws.  # [k]"""
        base = rng.key(self.seed, "compression", path, context.mode, context.round)
        return torch.from_numpy(rng.client_keys(base, ids)).to(context.device)


def _path(direction: str, name: str, call: int) -> str:
    """Return the name of a message's state."""
    return f"{direction}/{name}/{call}" if call else f"{direction}/{name}"


def num_bytes(t: Tensor) -> int:
    """Return the bytes of an uncompressed tensor."""
    return t.numel() * t.element_size()


def in_bytes(bits: Tensor) -> int:
    """Return the bytes of streams of these numbers of bits, each rounded up."""
    return int((bits + 7).div(8, rounding_mode="floor").sum())
