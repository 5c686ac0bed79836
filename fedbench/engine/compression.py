"""Compression of messages, for any method: an operator, and what both sides remember for it.

An upload: the client sends what its value adds to the reference, what the server expects of it, plus what its last
upload lacked (memory: Stich et al., NeurIPS 2018), and the server adds what it sees of that to the reference.
A download (direction="both"): the server sends what its value adds to what the client was sent last, which the server
knows, so that nothing is lost for good (Richtarik et al., NeurIPS 2021).  A broadcast is one for all: clients that
missed some pay for those too, or for the whole row, whatever is less.
Where the rest is remembered so, an operator that does not contract is damped (compression/_damped.py).

Integers, tensors of fewer than TINY numbers and running statistics pass as they are.

Letters: K clients of a cohort, n numbers of a message.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.compression._damped import contracting
from fedbench.compression.base import FLOAT, Message, Operator
from fedbench.core import rng
from fedbench.core.options import RunError
from fedbench.engine.rows import Rows, RowStore
from fedbench.nn.flat import FlatModel
from fedbench.nn.layout import Layout, layout_of

if TYPE_CHECKING:
    from fedbench.engine.cohort import Cohort

TINY = 128  # numbers of a client from which on a message is compressed: the rest are votes, losses, label counts
NOBODY = np.empty(0, np.int64)
THE_SERVER = np.zeros(1, np.int64)  # the row of what the server has one of


class Received(NamedTuple):
    """What the other side sees, in the shape that was sent, and the bytes that it took, of all clients together."""

    seen: Tensor
    num_bytes: int


class Compression:
    """operator: of all messages; rows: where memories and references are kept; model: whose rows messages are.

    State, below compression/: up/<name>/memory [N, n]; down/<name>/reference, of downloads [N, n], of broadcasts
    [1, n], with down/<name>/bits [1, 1], sent in all so far, and heard [N, 1], the same when a client was sent it last.
    acted: whether any message was compressed.
    """

    def __init__(self, operator: Operator, rows: RowStore, model: FlatModel, seed: int):
        self.operator, self.rows, self.model, self.seed = operator, rows, model, seed
        self.contracting = contracting(operator)
        self.acted = False
        self._is_set_up: set[str] = set()
        self._layout = functools.cache(functools.partial(layout_of, model))

    @property
    def compresses_downloads(self) -> bool:
        """Whether the server compresses, too."""
        return self.operator.direction == "both" and not self.operator.exact

    def upload(
        self, cohort: Cohort, name: str, value: Tensor, reference: Tensor | None, call: int, accumulates: bool
    ) -> Received:
        """What the server sees of value [K, ...], and what it takes.

        reference: what it knew of it before, [...] or [K, ...]; None: 0.  call: how often these clients uploaded the
        name in this round before.  accumulates: whether what an upload lacks is to be added to the next one; otherwise
        a reference is what the server has of it, and the next one makes up for it.
        """
        if self._passes(value):
            return Received(value, num_bytes(value))
        path, x = _path("up", name, call), value.reshape(len(value), -1)  # [K, n]
        before = 0.0 if reference is None else reference.expand_as(value).reshape(x.shape)
        due = x - before
        memory = self._memory(path, cohort, x.shape[1]) if accumulates and self.operator.memory else None
        if memory is not None:
            due = due + memory[cohort.ids]
        is_made_up_for = memory is not None or not (accumulates or reference is None)
        message, keys = self._message(path, name, x.shape[1], cohort), self._keys(path, cohort, cohort.ids)
        sent, bits = self._send(self.contracting if is_made_up_for else self.operator, due, message, keys)
        if memory is not None:
            memory[cohort.ids] = due - sent
        return Received(self._with_running_statistics(before + sent, x).view(value.shape), in_bytes(bits))

    def broadcast(self, cohort: Cohort, name: str, value: Tensor, call: int) -> Received:
        """What the clients see of one value [...] for all, and what it takes.

        In an evaluation, what they would see if they were sent it now; then nothing is remembered.
        """
        if not self.compresses_downloads or self._passes(value[None]):
            return Received(value, len(cohort) * num_bytes(value))
        path, x = _path("down", name, call), value.reshape(1, -1)  # [1, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]), 1)
        if last.used:
            message = self._message(path, name, x.shape[1], None)
            seen, bits = self._growth(cohort, x, last[THE_SERVER], message, THE_SERVER)
        else:
            seen, bits = x, torch.full((1,), FLOAT * x.shape[1], device=x.device)
        if cohort.purpose != "round":
            return Received(seen.view(value.shape), 0)
        last[THE_SERVER] = seen
        return Received(seen.view(value.shape), in_bytes(self._bits_missed(path, cohort, bits, x.shape[1])))

    def _bits_missed(self, path: str, cohort: Cohort, bits: Tensor, size: int) -> Tensor:
        """What each client is sent with a broadcast of bits [1]: all since it was sent one, or the row itself, of size
        numbers, where it never was or that is less.  # [K]"""
        in_all = self._rows(f"{path}/bits", torch.zeros_like(bits), 1)
        heard = self._rows(f"{path}/heard", torch.zeros_like(bits))  # in_all when a client was sent it last  [N, 1]
        now, whole = in_all[THE_SERVER] + bits, torch.full_like(bits, FLOAT * size)  # [1, 1], [1]
        missed = torch.where(heard.has(cohort.ids), (now - heard[cohort.ids])[:, 0], whole)
        in_all[THE_SERVER], heard[cohort.ids] = now, now.expand(len(cohort), 1)
        return missed.minimum(whole)

    def download(self, cohort: Cohort, name: str, value: Tensor, call: int) -> Received:
        """What each client sees of its own row of value [K, ...], and what it takes.  In an evaluation as above."""
        if not self.compresses_downloads or self._passes(value):
            return Received(value, num_bytes(value))
        path, x = _path("down", name, call), value.reshape(len(value), -1)  # [K, n]
        last = self._rows(f"{path}/reference", torch.zeros_like(x[0]))
        message, knows = (
            self._message(path, name, x.shape[1], cohort, weighted=False),
            last.has(cohort.ids),
        )  # knows [K]
        seen, bits = self._growth(cohort, x, last[cohort.ids], message, cohort.ids)
        seen = torch.where(knows[:, None], seen, x)  # at first the whole row
        bits = torch.where(knows, bits, FLOAT * x.shape[1])
        if cohort.purpose == "round":
            last[cohort.ids] = seen
        return Received(seen.view(value.shape), in_bytes(bits))

    def _growth(
        self, cohort: Cohort, x: Tensor, before: Tensor, message: Message, ids: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """What is seen of rows x [k, n] when what they add to those before [k, n] is sent, and the bits [k]; in an
        evaluation no operator remembers it."""
        keys, keep = self._keys(message.name, cohort, ids), cohort.purpose == "round"
        sent, bits = self._send(self.contracting, x - before, message, keys, keep)
        return self._with_running_statistics(before + sent, x), bits

    def observe(self, losses: Tensor) -> int:
        """Let the operator learn from the clients' training losses [K]; the bytes in which they tell them."""
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
        self, operator: Operator, due: Tensor, message: Message, keys: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """What is seen of rows due [k, n], and the bits; what is not compressed of them is there as it is."""
        num_parameters = message.size
        seen, bits = operator(due[:, :num_parameters].contiguous(), rng.RowRandom(keys), message, keep)
        if num_parameters == due.shape[1]:
            return seen, bits
        rest = due[:, num_parameters:]
        return torch.cat([seen, rest], 1), bits + FLOAT * rest.shape[1]

    def _with_running_statistics(self, seen: Tensor, x: Tensor) -> Tensor:
        """seen [k, n], with the running statistics of x: a reference plus a difference rounds."""
        layout = self._layout(x.shape[1])
        if layout is not None and layout.parameters < x.shape[1]:
            seen[:, layout.parameters :] = x[:, layout.parameters :]
        return seen

    def _message(self, path: str, name: str, size: int, cohort: Cohort | None, weighted: bool = True) -> Message:
        """What both sides know of it; cohort: None of a row for all clients; weighted: whether it goes
        into a mean of theirs.  RunError where running statistics may be
        anywhere in it."""
        layout = self._layout(size)
        if layout is None:
            if self.model.buffer_names:
                raise RunError(
                    f"compression: what the method sends as {name!r}, {size:,} numbers, is no row of the model and no "
                    "group of its columns, and could hold batch norm's running statistics, which are not to be "
                    "compressed: use a model without them, such as model.norm=group where it has that option"
                )
            layout = Layout({}, size)
        ids = NOBODY if cohort is None else cohort.ids
        weights = None if cohort is None or not weighted else cohort.weights
        message = Message(path, layout.parameters, ids, layout.spans, weights, weights)
        if path not in self._is_set_up:
            self.operator.setup(self.rows, message.of(0, 0))
            self._is_set_up.add(path)
        return message

    def _memory(self, path: str, cohort: Cohort, size: int) -> Rows:
        """What each client's uploads lacked so far.  # [N, n]"""
        return self._rows(f"{path}/memory", torch.zeros(size, device=cohort.device))

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

    def _keys(self, path: str, cohort: Cohort, ids: np.ndarray) -> Tensor:
        """A key for the draws of each of ids.  # [k]"""
        base = rng.key(self.seed, "compression", path, cohort.purpose, cohort.round)
        return torch.from_numpy(rng.client_keys(base, ids)).to(cohort.device)


def _path(direction: str, name: str, call: int) -> str:
    """The name of a message among all of a run's."""
    return f"{direction}/{name}/{call}" if call else f"{direction}/{name}"


def num_bytes(t: Tensor) -> int:
    """Bytes of a tensor as it is."""
    return t.numel() * t.element_size()


def in_bytes(bits: Tensor) -> int:
    """Streams of so many bits each, in whole bytes, all together."""
    return int((bits + 7).div(8, rounding_mode="floor").sum())
