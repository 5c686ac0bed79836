"""Lazy per-client state: a matrix [N, ...] of which only the rows ever written take memory.

A million clients cost an index of one int32 each; a row appears when it is first written and equals the
default until then.  The rows live on the compute device, in host memory or in a memory-mapped file, by size: that of
as many rows as the run's rounds can write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from fedbench.core.memory import is_in_memory, physical_memory, scratch_folder
from fedbench.core.options import require

Ids = np.ndarray
BIG = 1 << 30  # bytes from which on a store gets room for all its rows at once: growing would copy it
BLOCK = 64 << 20  # bytes that are read from a checkpoint at a time


class Rows:
    """rows[ids] gathers [K, ...] (a copy, on the device); rows[ids] = values writes.  ids: int64 NumPy array.
    most: how many rows are expected to be written."""

    def __init__(
        self,
        name: str,
        num_clients: int,
        default: Tensor,
        device: torch.device,
        place: str = "device",
        most: int | None = None,
    ):
        self.name, self.num_clients, self.device, self.place = name, num_clients, device, place
        self.most = min(most or num_clients, num_clients)
        self.default = default.detach().clone()
        self.slot = np.full(num_clients, -1, np.int32)  # where a client's row is, -1: untouched
        self.used = 0
        self.store = self._allocate(0)
        self.staging: Tensor | None = None  # pinned: the way between a GPU and host memory

    @property
    def row_bytes(self) -> int:
        """Bytes of one client's row."""
        return self.default.numel() * self.default.element_size()

    def _allocate(self, capacity: int) -> Tensor:
        shape = (capacity, *self.default.shape)
        if self.place == "disk" and capacity and self.default.numel():
            handle, path = tempfile.mkstemp(prefix=f"fedbench-{self.name.replace('/', '-')}-", dir=scratch_folder())
            os.close(handle)
            store = torch.from_file(
                path, shared=True, size=capacity * self.default.numel(), dtype=self.default.dtype
            ).view(shape)
            os.unlink(path)  # the mapping keeps it alive, nothing is left behind
            return store
        where = self.device if self.place == "device" else torch.device("cpu")
        return torch.empty(shape, dtype=self.default.dtype, device=where)

    def _grow(self, needed: int) -> None:
        if needed <= len(self.store):
            return
        capacity = min(max(needed, 2 * len(self.store), 8), self.num_clients)
        if needed <= self.most and (self.place == "disk" or capacity * self.row_bytes > BIG):
            capacity = self.most  # pages of a file, or of host memory, are taken when first written
        bigger = self._allocate(capacity)
        bigger[: self.used] = self.store[: self.used]
        self.store = bigger

    def __getitem__(self, ids: Ids) -> Tensor:
        slots = self.slot[ids]
        if (slots >= 0).all():
            return self._read(slots)
        out = self.default.to(self.device).expand(len(ids), *self.default.shape).clone()
        have = np.flatnonzero(slots >= 0)
        if len(have):
            out[torch.from_numpy(have).to(self.device)] = self._read(slots[have])
        return out

    def _read(self, slots: np.ndarray) -> Tensor:
        """The stored rows in these slots [k], on the device.  # [k, ...]"""
        where = torch.from_numpy(slots.astype(np.int64)).to(self.store.device)
        if self.device.type != "cuda" or self.place == "device":
            return self.store[where].to(self.device)
        return torch.index_select(self.store, 0, where, out=self._pinned(len(where))).to(self.device)

    def _pinned(self, count: int) -> Tensor:
        """Page-locked host memory for some rows, kept for the next ones.  # [count, ...]"""
        if self.staging is None or len(self.staging) < count:
            self.staging = torch.empty((count, *self.default.shape), dtype=self.default.dtype, pin_memory=True)
        return self.staging[:count]

    def __setitem__(self, ids: Ids, values: Tensor) -> None:
        new = ids[self.slot[ids] < 0]
        self._grow(self.used + len(new))
        self.slot[new] = np.arange(self.used, self.used + len(new))
        self.used += len(new)
        where = torch.from_numpy(self.slot[ids].astype(np.int64)).to(self.store.device)
        values = values.detach()
        if values.device.type == "cuda" and self.place != "device" and values.dim() > self.default.dim():
            values = self._pinned(len(where)).copy_(values)
        self.store[where] = values.to(self.store)

    def has(self, ids: Ids) -> Tensor:
        """Which of these clients' rows were ever written.  # [K] bool"""
        return torch.from_numpy(self.slot[ids] >= 0).to(self.device)

    def whole(self) -> Tensor:
        """All rows, touched or not.  # [N, ...]"""
        return self[np.arange(self.num_clients)]

    def touched(self) -> Ids:
        """The clients whose row was ever written, ascending."""
        return np.flatnonzero(self.slot >= 0)

    def state_dict(self) -> dict[str, Tensor]:
        """The clients whose rows were written, and these rows, for saving at once: what lies in host memory or in a
        file is not copied, and shows later writes."""
        ids = self.touched()
        order = ids[np.argsort(self.slot[ids])]  # as they lie in the store
        rows = self.store[: self.used]
        if rows.device.type == "cpu" and rows.numel():  # a view that ends with its rows: they alone are written
            rows = torch.from_numpy(rows.view(-1).view(torch.uint8).numpy()).view(rows.dtype).view(rows.shape)
        return {"ids": torch.from_numpy(order), "rows": rows.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """ValueError where the rows are none of these clients', or not of this kind."""
        if state["rows"].shape[1:] == (1,) and self.default.dim() == 1:  # one count, from before each parameter had one
            state = {**state, "rows": state["rows"].expand(-1, len(self.default))}
        self._check(state["ids"], state["rows"])
        self.slot[:] = -1
        self.used, self.store = 0, self._allocate(0)
        ids, size = state["ids"].numpy(), max(1, BLOCK // max(self.row_bytes, 1))
        self._grow(len(ids))
        for a in range(0, len(ids), size):
            self[ids[a : a + size]] = state["rows"][a : a + size]

    def _check(self, ids: Tensor, rows: Tensor) -> None:
        fits = ids.dtype == torch.int64 and rows.dtype == self.default.dtype
        if not fits or rows.shape != (len(ids), *self.default.shape):
            raise ValueError(
                f"the rows {self.name!r} are {rows.dtype} {tuple(rows.shape)}, not {self.default.dtype} "
                f"{(len(ids), *self.default.shape)}"
            )
        known = ids.numpy()
        if len(np.unique(known)) < len(known) or ((known < 0) | (known >= self.num_clients)).any():
            raise ValueError(f"the rows {self.name!r} are of other clients than 0 to {self.num_clients - 1}")


def memory(device: torch.device) -> int:
    """Bytes: what is free on a GPU, what this machine has elsewhere."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return physical_memory()


def disk_space() -> int:
    """Return the free bytes of the folder for temporary files, or 0 if that folder is kept in memory."""
    folder = scratch_folder()
    return 0 if is_in_memory(folder) else shutil.disk_usage(folder).free


class RowStore:
    """Makes the Rows of a run and knows what they may come to take; the algorithm sees it as rows(name, default).

    device_limit, host_limit, disk_limit (None: what is free): bytes for all of them together.  most: rows that a run
    can write (None: all): of min(N, rounds x K) clients.
    """

    def __init__(
        self,
        num_clients: int,
        device: torch.device,
        device_limit: int,
        host_limit: int,
        disk_limit: int | None = None,
        most: int | None = None,
    ):
        self.num_clients, self.device, self.most = num_clients, device, min(most or num_clients, num_clients)
        self.left = {"device": device_limit, "host": host_limit}
        if disk_limit is not None:
            self.left["disk"] = disk_limit
        self.all: dict[str, Rows] = {}
        self.setting_up = True  # False from the first round on
        self.late: set[str] = set()  # the names of what rounds made
        self._waiting: dict[str, dict[str, Tensor]] = {}  # what rounds before a resume made, until it is asked for

    def __call__(self, name: str, default: Tensor, count: int | None = None) -> Rows:
        """A lazy [N, *default.shape] store whose untouched rows equal default.  A name is given once.

        count: of rows that are no clients', of clusters say, instead of N.  What a round makes, not `setup`, has its
        rows again after a resume.
        """
        if name in self.all:
            raise ValueError(f"there are rows named {name!r} already: a method's states need a name each")
        most = self.most if count is None else count
        total = most * default.numel() * default.element_size()
        place = next((p for p in ("device", "host") if total <= self.left[p]), "disk")
        if place == "disk":
            free = self.left.setdefault("disk", disk_space())
            require(
                total <= free,
                f"the state {name!r} may come to {total / 2**30:,.1f} GiB ({self._rows(default.numel(), count)}): that "
                f"fits neither in memory nor on disk in {scratch_folder()}, with {free / 2**30:,.1f} GiB left; lower "
                "partition.num_clients, clients_per_round or rounds, or set the variable TMPDIR to a larger disk",
            )
        self.left[place] -= total
        self.all[name] = rows = Rows(name, count or self.num_clients, default, self.device, place, most)
        if not self.setting_up:
            self.late.add(name)
        if name in self._waiting:
            rows.load_state_dict(self._waiting.pop(name))
        return rows

    def plan(self) -> list[str]:
        """One line per store: its full size and where it lives, for the notice before round 1."""
        return [f"{self.size(r.name, r.default, r.num_clients)}, {r.place}" for r in self.all.values()]

    def size(self, name: str, default: Tensor, count: int | None = None) -> str:
        """What a store may come to."""
        most = self.most if count in (None, self.num_clients) else count
        total = most * default.numel() * default.element_size()
        return f"{name}: {self._rows(default.numel(), count)}, {total / 2**20:,.1f} MiB at most"

    def _rows(self, numbers: int, count: int | None) -> str:
        if count not in (None, self.num_clients):
            return f"{count:,} x {numbers:,} numbers"
        some = f"{self.most:,} of " if self.most < self.num_clients else ""
        return f"{some}{self.num_clients:,} x {numbers:,} numbers"

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The rows of every store that were written, by name."""
        return {name: rows.state_dict() for name, rows in self.all.items()} | self._waiting

    def load_state_dict(self, state: dict[str, dict[str, Tensor]], late: Collection[str] = ()) -> None:
        """Put stored rows back, those named in late when they are asked for; ValueError where the others are not those
        of the run."""
        self.late = set(late)
        self._waiting = {name: state[name] for name in late if name not in self.all}
        state = {name: rows for name, rows in state.items() if name not in self._waiting}
        if unknown := state.keys() - self.all.keys():
            raise ValueError(f"it has rows {', '.join(sorted(unknown))}, which the run has not")
        for name, rows in self.all.items():
            rows.load_state_dict(state[name])
