"""Compression of messages with error feedback.

Uplink: a client sends its value minus the reference, plus the residual of its last upload (Stich et al., NeurIPS
2018).  The server adds what it receives to the reference.
Downlink (direction="both"): the server sends its value minus the version that the client has, which the server keeps
(Richtarik et al., NeurIPS 2021).  A broadcast is one message for all.  A client that missed some is sent those as well,
or the whole row if that takes fewer bytes.
With error feedback, a compressor that is not contractive is scaled (compression/_damped.py).

Integers, tensors of fewer than TINY numbers and running statistics are sent uncompressed.

Letters: K clients, N of the federation, n numbers of a message.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._damped import contracting
from fedbench.compression.base import FLOAT, Message, Operator
from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.core.round_context import RoundContext
from fedbench.core.rows import Rows, RowStore
from fedbench.nn.flat import FlatModel
from fedbench.nn.row_layout import MessageLayout

TINY = 128  # smaller messages (votes, losses, label counts) are not compressed
NOBODY = np.empty(0, np.int64)
THE_SERVER = np.zeros(1, np.int64)  # the id of a state that exists once


class Received(NamedTuple):
    """A message as the other side sees it, in the shape that was sent, and its bytes, of all clients together."""

    seen: Tensor
    num_bytes: int


class Compression:
    """Compresses all messages of a run.

    Its state are rows by these names, below compression/:
        up/<name>/memory: The residual of each client.  # [N, n]
        down/<name>/reference: The version that each client has ([N, n]), or all have of a broadcast ([1, n]).
        down/<name>/bits: Bits of all broadcasts so far.  # [1, 1]
        down/<name>/heard: The same when a client was last sent one.  # [N, 1]

    Args:
        operator: Compresses rows.
        rows: Creates the state.
        model: Gives the parameters of a row.
        seed: The run's seed.

    Attributes:
        acted: Whether the operator has been given a message, even if it is an exact one.
    """

    def __init__(self, operator: Operator, rows: RowStore, model: FlatModel, seed: int):
        self.operator, self.rows, self.model, self.seed = operator, rows, model, seed
        self.contracting = contracting(operator)
        self.acted = False
        self._is_set_up: set[str] = set()
        self._layout = functools.cache(model.message_layout)

    @property
    def compresses_downloads(self) -> bool:
        """Whether the server compresses, too."""
        return self.operator.direction == "both" and not self.operator.exact

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
        memory = self._memory(path, context, x.shape[1]) if accumulates and self.operator.error_feedback else None
        if memory is not None:
            residual = residual + memory[context.ids]
        # A later upload repairs this one: by error feedback, or because it replaces it.
        is_repaired = memory is not None or (reference is not None and not accumulates)
        message, keys = self._message(path, name, x.shape[1], context), self._keys(path, context, context.ids)
        sent, bits = self._send(self.contracting if is_repaired else self.operator, residual, message, keys)
        if memory is not None:
            memory[context.ids] = residual - sent
        return Received(self._with_running_statistics(before + sent, x).view(value.shape), in_bytes(bits))

    def broadcast(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress one value [...] for all clients.  An evaluation leaves the state unchanged."""
        if not self.compresses_downloads or self._passes(value[None]):
            return Received(value, len(context) * num_bytes(value))
        path, x = _path("down", name, call), value.reshape(1, -1)  # [1, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]), 1)
        if last.used:
            message = self._message(path, name, x.shape[1], None)
            seen, bits = self._difference(context, x, last[THE_SERVER], message, THE_SERVER)
        else:
            seen, bits = x, torch.full((1,), FLOAT * x.shape[1], device=x.device)
        if not context.changes_state:
            return Received(seen.view(value.shape), 0)
        last[THE_SERVER] = seen
        return Received(seen.view(value.shape), in_bytes(self._bits_missed(path, context, bits, x.shape[1])))

    def _bits_missed(self, path: str, context: RoundContext, bits: Tensor, size: int) -> Tensor:
        """Return the bits that each client is sent with a broadcast of bits [1].  # [K]

        These are the broadcasts since its last one, or the row itself, of size numbers, if that is less.
        """
        in_all = self._rows(f"{path}/bits", torch.zeros_like(bits), 1)
        heard = self._rows(f"{path}/heard", torch.zeros_like(bits))  # [N, 1]
        now, whole = in_all[THE_SERVER] + bits, torch.full_like(bits, FLOAT * size)  # [1, 1], [1]
        missed = torch.where(heard.has(context.ids), (now - heard[context.ids])[:, 0], whole)
        in_all[THE_SERVER], heard[context.ids] = now, now.expand(len(context), 1)
        return missed.minimum(whole)

    def download(self, context: RoundContext, name: str, value: Tensor, call: int) -> Received:
        """Compress a row for each client [K, ...].  An evaluation leaves the state unchanged."""
        if not self.compresses_downloads or self._passes(value):
            return Received(value, num_bytes(value))
        path, x = _path("down", name, call), value.reshape(len(value), -1)  # [K, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]))
        message = self._message(path, name, x.shape[1], context, weighted=False)
        has_version = last.has(context.ids)  # [K]
        seen, bits = self._difference(context, x, last[context.ids], message, context.ids)
        seen = torch.where(has_version[:, None], seen, x)  # the first time the whole row
        bits = torch.where(has_version, bits, FLOAT * x.shape[1])
        if context.changes_state:
            last[context.ids] = seen
        return Received(seen.view(value.shape), in_bytes(bits))

    def _difference(
        self, context: RoundContext, x: Tensor, before: Tensor, message: Message, ids: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Send rows x minus the rows before [k, n].  Return the rows that are seen [k, n] and the bits [k]."""
        keys, keep = self._keys(message.name, context, ids), context.changes_state
        sent, bits = self._send(self.contracting, x - before, message, keys, keep)
        return self._with_running_statistics(before + sent, x), bits

    def observe(self, losses: Tensor) -> int:
        """Give the operator the clients' training losses [K], and return the bytes that these take."""
        if not self.operator.reads_losses:
            return 0
        self.operator.observe(losses)
        return num_bytes(losses)

    def _passes(self, value: Tensor) -> bool:
        """Whether value [K, ...] is sent as it is."""
        if value.dtype != torch.float32 or math.prod(value.shape[1:]) < TINY:
            return True
        self.acted = True
        return self.operator.exact

    def _send(
        self, operator: Operator, rows: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compress rows [k, n].  Running statistics, behind the parameters, stay uncompressed."""
        num_parameters = message.size
        seen, bits = operator(rows[:, :num_parameters].contiguous(), rng.RowRandom(keys), message, keep)
        if num_parameters == rows.shape[1]:
            return seen, bits
        rest = rows[:, num_parameters:]
        return torch.cat([seen, rest], 1), bits + FLOAT * rest.shape[1]

    def _with_running_statistics(self, seen: Tensor, x: Tensor) -> Tensor:
        """Copy the running statistics of x into seen [k, n], because reference plus difference would round them."""
        layout = self._layout(x.shape[1])
        if layout is not None and layout.parameters < x.shape[1]:
            seen[:, layout.parameters :] = x[:, layout.parameters :]
        return seen

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
                    f"compression: what the method sends as {name!r}, {size:,} numbers, is no row of the model and no "
                    "group of its columns, and could hold batch norm's running statistics, which are not to be "
                    "compressed: use a model without them, such as model.norm=group where it has that option"
                )
            layout = MessageLayout({}, size)
        ids = NOBODY if context is None else context.ids
        weights = None if context is None or not weighted else context.mean_weights
        message = Message(path, layout.parameters, ids, layout.spans, weights, weights)
        if path not in self._is_set_up:
            self.operator.setup(self.rows, message.of(0, 0))
            self._is_set_up.add(path)
        return message

    def _memory(self, path: str, context: RoundContext, size: int) -> Rows:
        """Return the residuals of all clients.  # [N, n]"""
        return self._rows(f"{path}/memory", torch.zeros(size, device=context.device))

    def _rows(self, path: str, default: Tensor, count: int | None = None) -> Rows:
        name = f"compression/{path}"
        rows = self.rows.all[name] if name in self.rows.all else self.rows(name, default, count)
        if rows.default.shape != default.shape:
            raise RunError(
                f"compression: the method sends {default.numel():,} numbers as {path.split('/')[1]!r}, and sent "
                f"{rows.default.numel():,} before, which are remembered: send them under another name, or, in an "
                "upload, among those that replace what was sent before"
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
