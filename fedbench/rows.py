"""Lazy per-client state: a matrix [N, ...] of which only the rows ever written take memory.

A million clients cost an index of one int32 each; a row appears when it is first written and equals the
default until then.  The rows live on the compute device, in host memory or in a memory-mapped file, by size.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray


class Rows:
    """rows[ids] gathers [K, ...] (a copy, on the device); rows[ids] = values writes.  ids: int64 NumPy array."""

    def __init__(self, name: str, num_clients: int, default: Tensor, device: torch.device, place: str = "device"):
        self.name, self.num_clients, self.device, self.place = name, num_clients, device, place
        self.default = default.detach().clone()
        self.slot = np.full(num_clients, -1, np.int32)         # where a client's row is, -1: untouched
        self.used = 0
        self.store = self._allocate(0)

    @property
    def row_bytes(self) -> int:
        return self.default.numel() * self.default.element_size()

    def _allocate(self, capacity: int) -> Tensor:
        shape = (capacity, *self.default.shape)
        if self.place == "disk" and capacity:
            handle, path = tempfile.mkstemp(prefix=f"fedbench-{self.name.replace('/', '-')}-")
            os.close(handle)
            store = torch.from_file(path, shared=True, size=capacity * max(self.default.numel(), 1),
                                    dtype=self.default.dtype).view(shape)
            os.unlink(path)                                    # the mapping keeps it alive, nothing is left behind
            return store
        where = self.device if self.place == "device" else torch.device("cpu")
        return torch.empty(shape, dtype=self.default.dtype, device=where)

    def _grow(self, needed: int) -> None:
        if needed <= len(self.store):
            return
        capacity = min(max(needed, 2 * len(self.store), 8), self.num_clients)
        bigger = self._allocate(capacity)
        bigger[:self.used] = self.store[:self.used]
        self.store = bigger

    def __getitem__(self, ids: Ids) -> Tensor:
        slots = self.slot[ids]
        if (slots >= 0).all():
            return self.store[torch.from_numpy(slots.astype(np.int64)).to(self.store.device)].to(self.device)
        out = self.default.to(self.device).expand(len(ids), *self.default.shape).clone()
        have = np.flatnonzero(slots >= 0)
        if len(have):
            found = self.store[torch.from_numpy(slots[have].astype(np.int64)).to(self.store.device)]
            out[torch.from_numpy(have).to(self.device)] = found.to(self.device)
        return out

    def __setitem__(self, ids: Ids, values: Tensor) -> None:
        new = ids[self.slot[ids] < 0]
        self._grow(self.used + len(new))
        self.slot[new] = np.arange(self.used, self.used + len(new))
        self.used += len(new)
        where = torch.from_numpy(self.slot[ids].astype(np.int64)).to(self.store.device)
        self.store[where] = values.detach().to(self.store)

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
        ids = self.touched()
        return {"ids": torch.from_numpy(ids), "rows": self.store[torch.from_numpy(self.slot[ids].astype(np.int64))
                                                                 .to(self.store.device)].cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.slot[:] = -1
        self.used, self.store = 0, self._allocate(0)
        if len(state["ids"]):
            self[state["ids"].numpy()] = state["rows"].to(self.device)


def memory(device: torch.device) -> int:
    """Bytes: what is free on a GPU, what this machine has elsewhere."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30


class RowStore:
    """Makes the Rows of a run and knows what they may come to take; the algorithm sees it as rows(name, default)."""

    def __init__(self, num_clients: int, device: torch.device, device_limit: int, host_limit: int):
        self.num_clients, self.device = num_clients, device
        self.limits = {"device": device_limit, "host": host_limit}
        self.all: dict[str, Rows] = {}

    def __call__(self, name: str, default: Tensor) -> Rows:
        """A lazy [N, *default.shape] store whose untouched rows equal default."""
        total = self.num_clients * default.numel() * default.element_size()
        place = "device" if total <= self.limits["device"] else "host" if total <= self.limits["host"] else "disk"
        self.all[name] = Rows(name, self.num_clients, default, self.device, place)
        return self.all[name]

    def plan(self) -> list[str]:
        """One line per store: its full size and where it lives, for the notice before round 1."""
        return [f"{r.name}: {self.num_clients:,} x {r.default.numel():,} numbers, "
                f"{self.num_clients * r.row_bytes / 2**20:,.1f} MiB at most, {r.place}" for r in self.all.values()]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {name: rows.state_dict() for name, rows in self.all.items()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for name, rows in self.all.items():
            rows.load_state_dict(state[name])
