"""Lazy state per client: a matrix with one row per client, which uses memory only for rows that were written.

A row equals the default until it is first written.  Rows are stored on the compute device, in host memory or in a
memory-mapped file, depending on the size of all rows that a run can write.

Letters: N clients, K clients of an access.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from fedbench.core.memory import is_in_memory, physical_memory, scratch_folder, size_text
from fedbench.core.options import require

Ids = np.ndarray
BIG = 1 << 30  # bytes from which on a store is allocated for all its rows at once, because growing copies it
BLOCK = 64 << 20  # bytes read from a checkpoint at a time


class Rows:
    """A lazy matrix [N, ...]: `slot` has the index of each client's row in `store`, -1 if the row was never written.

    ``rows[ids]`` returns a copy [K, ...] on the device, and ``rows[ids] = values`` writes.  ids is an int64 array.

    Args:
        name: The name of the state.
        num_clients: N.
        default: The initial value of each row.  # [...]
        device: The compute device.
        location: Where rows are stored: "device", "host" (memory) or "disk".
        most: The number of rows that the run is expected to write.  None: N.

    Attributes:
        slot: The index of each client's row in the store; -1 if it was never written.  # [N] int32
        used: The number of rows in the store.
        store: The written rows, with room for more.  # [capacity, ...]
        largest: The largest number of rows in the store.
    """

    def __init__(
        self,
        name: str,
        num_clients: int,
        default: Tensor,
        device: torch.device,
        location: str = "device",
        most: int | None = None,
    ):
        self.name, self.num_clients, self.device, self.location = name, num_clients, device, location
        self.most = min(most or num_clients, num_clients)
        self.largest = num_clients
        self.default = default.detach().clone()
        self.slot = np.full(num_clients, -1, np.int32)  # index of each client's row in the store; -1: never written
        self.used = 0
        self.store = self._allocate(0)
        self.staging: Tensor | None = None  # pinned memory for copies between a GPU and the host

    @property
    def row_bytes(self) -> int:
        """The size of one client's row in bytes."""
        return self.default.numel() * self.default.element_size()

    def _allocate(self, capacity: int) -> Tensor:
        """Return an uninitialized tensor for `capacity` rows, where `location` says: "device", "host" or "disk".

        Returns:
            [capacity, ...], with the type and the shape of the default row.
        """
        shape = (capacity, *self.default.shape)
        if self.location == "disk" and capacity and self.default.numel():
            return mapped_tensor(scratch_folder(), self.name, shape, self.default.dtype)
        device = self.device if self.location == "device" else torch.device("cpu")
        return torch.empty(shape, dtype=self.default.dtype, device=device)

    def _grow(self, needed: int) -> None:
        """Replace the tensor `store` by a larger copy if it has room for fewer than `needed` rows."""
        if needed <= len(self.store):
            return
        capacity = min(max(needed, 2 * len(self.store), 8), self.largest)  # largest: all rows of this process
        # Doubling, from 8 rows on, copies the rows.  A store on disk or of more than 1 GiB at once gets room for all
        # rows that the run writes, self.most.  The system allocates its pages only when they are written.
        if needed <= self.most and (self.location == "disk" or capacity * self.row_bytes > BIG):
            capacity = self.most
        bigger = self._allocate(capacity)
        bigger[: self.used] = self.store[: self.used]
        self.store = bigger

    def __getitem__(self, ids: Ids) -> Tensor:
        slots = self.slot[ids]
        if (slots >= 0).all():
            return self._read(slots)
        out = self.default.to(self.device).expand(len(ids), *self.default.shape).clone()
        written = np.flatnonzero(slots >= 0)
        if len(written):
            out[torch.from_numpy(written).to(self.device)] = self._read(slots[written])
        return out

    def _read(self, slots: np.ndarray) -> Tensor:
        """Return the rows at the positions slots [K] of the store, on the compute device.  # [K, ...]"""
        index = torch.from_numpy(slots.astype(np.int64)).to(self.store.device)
        if self.device.type != "cuda" or self.location == "device":
            return self.store[index].to(self.device)
        return torch.index_select(self.store, 0, index, out=self._pinned(len(index))).to(self.device)

    def _pinned(self, count: int) -> Tensor:
        """Return page-locked host memory for copying `count` rows between GPU and host.

        Every call returns the beginning of the same tensor `staging`, so copy the rows before the next call.

        Returns:
            An uninitialized tensor [count, ...].
        """
        if self.staging is None or len(self.staging) < count:
            self.staging = torch.empty((count, *self.default.shape), dtype=self.default.dtype, pin_memory=True)
        return self.staging[:count]

    def __setitem__(self, ids: Ids, values: Tensor) -> None:
        new = ids[self.slot[ids] < 0]
        self._grow(self.used + len(new))
        self.slot[new] = np.arange(self.used, self.used + len(new))
        self.used += len(new)
        index = torch.from_numpy(self.slot[ids].astype(np.int64)).to(self.store.device)
        values = values.detach()
        if values.device.type == "cuda" and self.location != "device" and values.dim() > self.default.dim():
            values = self._pinned(len(index)).copy_(values)  # one row per client, from the GPU to the host
        self.store[index] = values.to(self.store)

    def has(self, ids: Ids) -> Tensor:
        """Return, for each of the clients ids [K], whether its row was written.  # [K] bool, on the compute device"""
        return torch.from_numpy(self.slot[ids] >= 0).to(self.device)

    def whole(self) -> Tensor:
        """Return the rows of all N clients; a row that was never written is the default.  # [N, ...]"""
        return self[np.arange(self.num_clients)]

    def touched(self) -> Ids:
        """Return the ids of the clients whose row was written, ascending.  # [k] int64"""
        return np.flatnonzero(self.slot >= 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the k clients whose rows were written, and these rows.

        Returns:
            "ids": the clients [k] int64; "rows": their rows [k, ...] on the CPU.  Rows in host memory or in a file are
            not copied: save them before the next write.
        """
        ids = np.flatnonzero(self.slot >= 0)  # slot: index of each client's row in the store, or -1
        order = ids[np.argsort(self.slot[ids])]  # in the order of the store
        rows = self.store[: self.used]
        # torch.save writes the whole store of which rows is a view.  A tensor from NumPy ends with its last row.
        if rows.device.type == "cpu" and rows.numel():
            rows = torch.from_numpy(rows.view(-1).view(torch.uint8).numpy()).view(rows.dtype).view(rows.shape)
        return {"ids": torch.from_numpy(order), "rows": rows.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the rows.

        Args:
            state: The result of `state_dict`.

        Raises:
            ValueError: The rows have another type or shape, or are of unknown clients.
        """
        # older versions stored one number of Adam's steps for all parameters
        if state["rows"].shape[1:] == (1,) and self.default.dim() == 1:
            state = {**state, "rows": state["rows"].expand(-1, len(self.default))}
        self._check(state["ids"], state["rows"])
        self.slot[:] = -1  # no row is written
        self.used, self.store = 0, self._allocate(0)
        ids, block_rows = state["ids"].numpy(), max(1, BLOCK // max(self.row_bytes, 1))  # in blocks, to limit memory
        self._grow(self._count_stored(ids))
        for start in range(0, len(ids), block_rows):
            self[ids[start : start + block_rows]] = state["rows"][start : start + block_rows]

    def _count_stored(self, ids: Ids) -> int:
        """Return how many rows of the clients ids [k] this process stores: k here, fewer if processes divide rows."""
        return len(ids)

    def _check(self, ids: Tensor, rows: Tensor) -> None:
        """Raise ValueError unless the entries of a checkpoint fit this state.

        Args:
            ids: The clients [k] whose rows were written: int64, different, and from 0 to N - 1.
            rows: Their rows [k, ...].  They must have the type and the shape of the default row.
        """
        fits = ids.dtype == torch.int64 and rows.dtype == self.default.dtype
        if not fits or rows.shape != (len(ids), *self.default.shape):
            raise ValueError(
                f"the checkpoint has the state {self.name!r} as {rows.dtype} of shape {tuple(rows.shape)}, but the "
                f"method now needs {self.default.dtype} and {(len(ids), *self.default.shape)}: undo changes of the "
                "method or the model"
            )
        numbers = ids.numpy()
        if len(np.unique(numbers)) < len(numbers) or ((numbers < 0) | (numbers >= self.num_clients)).any():
            raise ValueError(
                f"the state {self.name!r} of the checkpoint must belong to different clients from 0 to "
                f"{self.num_clients - 1}, but belongs to {numbers.tolist()[:12]}: restore an undamaged checkpoint"
            )


def mapped_tensor(folder: str | os.PathLike, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in a file that is mapped into memory, and that is deleted with the tensor.

    Args:
        folder: The folder of the file.
        name: A name for the file.
        shape: The shape, without a length of 0.
        dtype: The type.
    """
    handle, path = tempfile.mkstemp(prefix=f"fedbench-{name.replace('/', '-')}-", dir=folder)
    os.close(handle)
    tensor = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    os.unlink(path)  # the file exists until its mapping is closed
    return tensor


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes; for other devices, the size of the machine's memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return physical_memory()


def disk_space() -> int:
    """Return the free bytes on the disk of `scratch_folder`; 0 if that folder is on a file system in memory."""
    folder = scratch_folder()
    return 0 if is_in_memory(folder) else shutil.disk_usage(folder).free


class RowStore:
    """Creates the Rows of a run within limits of memory.  Methods call it as ``rows(name, default)``.

    Subclasses override `_max_rows` and `_create`, if a process stores only some of the rows.

    Args:
        num_clients: N.
        device: The compute device.
        device_limit: Bytes for all rows on the device.
        host_limit: Bytes for all rows in host memory.
        disk_limit: Bytes for all rows on disk.  None: the free space.
        most: The number of rows of each state that the run can write, min(N, rounds x K).  None: N.

    Attributes:
        is_sharded: Whether each process stores the rows of its own clients only.
    """

    is_sharded = False

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
        self.left = {"device": device_limit, "host": host_limit}  # bytes for further states, by location
        if disk_limit is not None:
            self.left["disk"] = disk_limit
        self.all: dict[str, Rows] = {}  # by name
        self.setting_up = True  # False from the first round on
        self.late: set[str] = set()  # names of rows that were created in rounds
        self._waiting: dict[str, dict[str, Tensor]] = {}  # restored rows of `late`, until a round creates them again

    def __call__(self, name: str, default: Tensor, count: int | None = None) -> Rows:
        """Create a lazy matrix with one row per client.

        Rows that a round creates, not `setup`, also have their values again after a resume.

        Args:
            name: The name of the state, unique in the run.
            default: The initial value of each row.  # [...]
            count: The number of rows.  None: N.  Use it for rows of clusters, for example.

        Returns:
            Rows [N, ...].

        Raises:
            ValueError: The name exists.
            ConfigError: There is not enough memory and disk space.
        """
        if name in self.all:
            raise ValueError(f"rows({name!r}) is called twice in setup: give each state of a method a name of its own")
        total = self._max_rows(default, count) * default.numel() * default.element_size()
        location = next((p for p in ("device", "host") if total <= self.left[p]), "disk")
        if location == "disk":
            free = self.left.setdefault("disk", disk_space())
            require(
                total <= free,
                f"the state {name!r} may need {size_text(total)} ({self._shape_text(default, count)}), but "
                f"memory is full and the disk of {scratch_folder()} has {size_text(free)} left; lower "
                "partition.num_clients, clients_per_round or rounds, or set the variable TMPDIR to a larger disk",
            )
        self.left[location] -= total
        self.all[name] = rows = self._create(name, default, location, count)
        if not self.setting_up:
            self.late.add(name)
        if name in self._waiting:
            rows.load_state_dict(self._waiting.pop(name))
        return rows

    def _max_rows(self, default: Tensor, count: int | None) -> int:
        """Return the largest number of rows of a state that this process stores.

        Args:
            default: The initial value of each row, which only subclasses need.  # [...]
            count: The number of rows.  None: one per client, of which the run can write at most `self.most`.
        """
        return self.most if count is None else count

    def _create(self, name: str, default: Tensor, location: str, count: int | None) -> Rows:
        """Return a new client state: a matrix with one row per client, in which no row is written yet.

        Args:
            name: The name of the state.
            default: The initial value of each row.  # [...]
            location: Where rows are stored: "device", "host" or "disk".
            count: The number of rows.  None: N.
        """
        most = self._max_rows(default, count)  # the rows that this process may have to store
        return Rows(name, count or self.num_clients, default, self.device, location, most)

    def plan(self) -> list[str]:
        """Return one line per state with its largest size and its location, as in "c_i: 100 x 650 numbers, ..., host".

        The lines are logged before round 1.
        """
        return [f"{self.size(r.name, r.default, r.num_clients)}, {r.location}" for r in self.all.values()]

    def size(self, name: str, default: Tensor, count: int | None = None) -> str:
        """Describe the largest size of a state, as in "c_i: 100 x 650 numbers, 0.2 MiB at most".

        Args:
            name: The name of the state.
            default: The initial value of each row.  # [...]
            count: The number of rows.  None: N.
        """
        count = None if count == self.num_clients else count
        total = self._max_rows(default, count) * default.numel() * default.element_size()  # bytes
        return f"{name}: {self._shape_text(default, count)}, {total / 2**20:,.1f} MiB at most"

    def _shape_text(self, default: Tensor, count: int | None) -> str:
        """Describe a matrix, as in "20 of 100 x 650 numbers": 650 per client, stored for at most 20 of 100 clients.

        Args:
            default: The initial value of each row.  # [...]
            count: The number of rows.  None: one per client.
        """
        max_rows, total = self._max_rows(default, count), self.num_clients if count is None else count
        stored = f"{max_rows:,} of " if max_rows < total else ""
        return f"{stored}{total:,} x {default.numel():,} numbers"

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the written rows of all client states, for a checkpoint.

        Returns:
            For each state, by name: "ids", the k clients whose rows were written, and "rows" [k, ...].
        """
        return {name: rows.state_dict() for name, rows in self.all.items()} | self._waiting  # not created yet

    def load_state_dict(self, state: dict[str, dict[str, Tensor]], late: Collection[str] = ()) -> None:
        """Restore the rows of every state.

        Args:
            state: The result of `state_dict`.
            late: Names of the states that rounds created.  They are restored when a round creates them again.

        Raises:
            ValueError: The rows do not fit the run.
        """
        self.late = set(late)
        # the rows that must wait until a round creates them
        self._waiting = {name: state[name] for name in late if name not in self.all}
        state = {name: rows for name, rows in state.items() if name not in self._waiting}
        if unknown := state.keys() - self.all.keys():
            raise ValueError(
                f"the checkpoint has the state {', '.join(sorted(unknown))}, which the method does not create: undo "
                "changes of the method or its options"
            )
        for name, rows in self.all.items():
            rows.load_state_dict(state[name])
