"""Client states that several processes divide (hardware.rows=sharded): a process stores the rows of its own clients.

All processes run the same simulation.  They read and write the same rows in the same order, so each of them knows which
rows were written.  A write stores the rows of this process's clients.  A read returns the rows of this process's
clients, as a tensor that is divided between the processes (divided_tensor.py).

Letters: N clients, K clients of an access, k clients whose rows were written, m of these that belong to this process.
"""

from __future__ import annotations

import errno
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbench.core.rows import BLOCK, Ids, Rows, RowStore, mapped_tensor
from fedbench.engine.divided_tensor import divided, local_rows
from fedbench.engine.ranks import Ranks

# Rows of at most so many bytes, such as counters, are stored by all processes, because an exchange costs more.
SMALL = 16


class ShardedRows(Rows):
    """A lazy matrix [N, ...] with one row per client, of which this process stores the rows of its own clients.

    Args:
        ranks: The processes of the run.
        name: The name of the state.
        num_clients: N.
        default: The initial value of each row.  # [...]
        device: The compute device.
        location: Where rows are stored: "device", "host" (memory) or "disk".
        most: The number of rows that this process is expected to store.

    Attributes:
        order: How many rows of other clients were written before the first write of a client's row, in all processes
            together; -1 if it was never written.  # [N] int32
        num_written: k, the number of clients whose row was written.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        num_clients: int,
        default: Tensor,
        device: torch.device,
        location: str,
        most: int,
    ):
        super().__init__(name, num_clients, default, device, location, most)
        self.ranks = ranks
        self.largest = count_owned(ranks, num_clients)
        self.order, self.num_written = np.full(num_clients, -1, np.int32), 0

    def __getitem__(self, ids: Ids) -> Tensor:
        owners = self.ranks.owner(ids)
        if not (self.order[ids] >= 0).any():  # all have the default, in all processes
            return super().__getitem__(ids)
        if self.ranks.is_distributed:
            return divided(super().__getitem__(ids[owners == self.ranks.rank]), ids, self.ranks)
        others = ids[(owners != self.ranks.rank) & (self.order[ids] >= 0)]
        if len(others):
            raise RuntimeError(
                f"this process does not store the state {self.name!r} of client {others[0]}, because "
                "hardware.rows=sharded: set hardware.rows=replicated, or read it outside of Ranks.undistributed"
            )
        return super().__getitem__(ids)

    def __setitem__(self, ids: Ids, values: Tensor) -> None:
        new = ids[self.order[ids] < 0]
        self.order[new] = np.arange(self.num_written, self.num_written + len(new))
        self.num_written += len(new)
        owners = self.ranks.owner(ids)
        if values.dim() == self.default.dim() or len(values) == 1:  # one row for all
            values = values.expand(len(ids), *self.default.shape)
        values = local_rows(values, owners, self.ranks)
        if len(values):
            super().__setitem__(ids[owners == self.ranks.rank], values)

    def has(self, ids: Ids) -> Tensor:
        """Return whether the row of each client was written, by any process, since the start of the run.

        Args:
            ids: The clients.  # [K] int64

        Returns:
            True for a written row; False for one that has the default.  # [K] bool, on the compute device
        """
        return torch.from_numpy(self.order[ids] >= 0).to(self.device)

    def touched(self) -> Ids:
        """Return the ids of all clients whose row was written, whichever process stores it, ascending.  # [k] int64"""
        return np.flatnonzero(self.order >= 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the rows that this process stores, and all clients whose rows were written.

        Returns:
            "ids": the m clients of the stored rows; "rows": these rows [m, ...], as `Rows.state_dict` returns them;
            "written": all k clients, in the order of first writes.  `gathered` joins the rows of all processes.
        """
        written = self.touched()
        in_order = written[np.argsort(self.order[written])]  # self.order: how many clients were written before
        return {**super().state_dict(), "written": torch.from_numpy(in_order)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the rows.

        Args:
            state: The result of `state_dict`, or a state of all clients as in a checkpoint.

        Raises:
            ValueError: The rows have another type or shape, or are of unknown clients.
        """
        super().load_state_dict(state)
        written = state.get("written", state["ids"]).numpy()  # a checkpoint has all rows, in the order of first writes
        self.order[:] = -1  # never written
        self.order[written] = np.arange(len(written))
        self.num_written = len(written)

    def _count_stored(self, ids: Ids) -> int:
        return int((self.ranks.owner(ids) == self.ranks.rank).sum())


class ShardedRowStore(RowStore):
    """Creates the client states of a run of several processes, of which each stores those of its own clients.

    Rows of at most SMALL bytes, and rows that do not belong to clients, are stored by all processes.

    Args:
        ranks: The processes of the run.
        num_clients: N.
        device: The compute device.
        limits: Bytes for all rows of this process on the device, in host memory and on disk, as in `RowStore`.
        most: The number of rows of each state that the run can write, in all processes together.
    """

    is_sharded = True

    def __init__(self, ranks: Ranks, num_clients: int, device: torch.device, *limits: int, most: int):
        super().__init__(num_clients, device, *limits, most=most)
        self.ranks = ranks

    def _is_divided(self, default: Tensor, count: int | None) -> bool:
        """Return whether processes divide a state: if it has a row per client, and a row has more than SMALL bytes.

        Args:
            default: The initial row.
            count: The number of rows.  None: N, one per client.
        """
        return count is None and default.numel() * default.element_size() > SMALL

    def _max_rows(self, default: Tensor, count: int | None) -> int:
        most = super()._max_rows(default, count)
        return min(most, count_owned(self.ranks, self.num_clients)) if self._is_divided(default, count) else most

    def _create(self, name: str, default: Tensor, location: str, count: int | None) -> Rows:
        if not self._is_divided(default, count):
            return super()._create(name, default, location, count)
        most = self._max_rows(default, count)
        return ShardedRows(self.ranks, name, self.num_clients, default, self.device, location, most)

    def plan(self) -> list[str]:
        """Return one line per state for the log, such as "c_i: 100 x 650 numbers, 0.2 MiB at most, host".

        If processes divide the state, the line continues with the MiB that they exchange to join all its rows.
        """
        lines = []
        for line, rows in zip(super().plan(), self.all.values()):
            size = self.most * rows.row_bytes / 2**20  # most: the number of rows that the run can write
            exchanged = f" of each process; a gather of all rows exchanges {size:,.1f} MiB"
            lines.append(line + exchanged if isinstance(rows, ShardedRows) else line)
        return lines


def count_owned(ranks: Ranks, num_clients: int) -> int:
    """Return how many of the clients 0 to num_clients - 1 this process owns (`Ranks.owner`)."""
    return int((ranks.owner(np.arange(num_clients)) == ranks.rank).sum())


def gathered(states: dict[str, dict[str, Tensor]], ranks: Ranks, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Join the rows of all processes on rank 0, block by block.  All processes must call this together.

    Args:
        states: From the name of a state to its "ids" and "rows" in this process, and "written" (all ids with a row, in
            any process) if processes divide the state.
        ranks: The processes of the run.
        folder: The folder of temporary files for states of more than 64 MiB, which are deleted with their tensors.

    Returns:
        On rank 0, the states that one process would have, equal in every byte.  On other ranks, states that are divided
        have no rows.
    """
    return {  # only states that are divided have "written"
        name: _gathered(name, state, ranks, folder) if "written" in state else state for name, state in states.items()
    }


def _gathered(name: str, state: dict[str, Tensor], ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Return {"ids": [k], "rows": [k, ...]} of one state on rank 0, and without rows on other ranks.

    Args:
        name: The name of the state.
        state: The state of this process (`ShardedRows.state_dict`): "written", all k clients in the order of first
            writes, and "rows", those of this process in the same order.
        ranks: The processes of the run.
        folder: The folder for a large state.
    """
    ids, rows = state["written"], state["rows"]
    row_bytes = max(1, rows.element_size() * math.prod(rows.shape[1:]))
    block_rows = max(1, BLOCK // row_bytes)  # rows that are exchanged at once, to limit memory
    joined = _empty(name, (len(ids) if ranks.is_first else 0, *rows.shape[1:]), rows.dtype, folder)
    num_read = 0  # rows of this process in earlier blocks
    for start in range(0, len(ids), block_rows):
        owners = ranks.owner(ids[start : start + block_rows].numpy())
        positions_by_rank = [np.flatnonzero(owners == rank) for rank in range(ranks.world_size)]
        mine = torch.from_numpy(positions_by_rank[ranks.rank])
        block = rows.new_zeros(len(owners), *rows.shape[1:])
        block[mine] = rows[num_read : num_read + len(mine)]
        num_read += len(mine)
        ranks.exchange(positions_by_rank, {f"checkpoint of rows {name}": block})
        if ranks.is_first:
            joined[start : start + len(owners)] = block
    return {"ids": ids, "rows": joined}


def _empty(name: str, shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Return an uninitialized tensor in host memory, or in a temporary file if it has more than 64 MiB.

    Args:
        name: The name of the state.
        shape: The shape.
        dtype: The type.
        folder: The folder for the file.

    Raises:
        OSError: The disk is full.
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= BLOCK:
        return torch.empty(shape, dtype=dtype)
    if size > shutil.disk_usage(folder).free:  # else, writing to the mapped file would end the process
        raise OSError(  # ENOSPC: no space left on the device
            errno.ENOSPC, f"rows {name!r} of all processes take {size / 2**30:,.1f} GiB for a checkpoint", str(folder)
        )
    return mapped_tensor(folder, name, shape, dtype)
