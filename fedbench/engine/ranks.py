"""The processes of a distributed run, started by torchrun on one machine or on several.

    torchrun --nproc-per-node=4 -m fedbench hardware=ddp algorithm=pgfed

Each rank has all data and all state by default, and runs the same simulation.  Server computations are
replicated.  They are equal because all random numbers are keyed.  Computations for clients (local training, gradients,
scores) are divided between ranks, balanced by their work, and their results are exchanged.  Methods therefore do not
depend on ranks, and results are those of one process.

With hardware.rows=sharded, a rank stores the states of the clients that it owns (sharded_rows.py), computes for these,
and keeps the rows that it trained (divided_tensor.py).
With hardware.samples=sharded, a rank stores the samples of the clients that it owns (shard.py), and computes for these.

Rank 0 reads the command, writes files and logs.  The others receive the configuration from it
(`simulation/processes.py`).  Before each exchange, all ranks synchronize over gloo (`Ranks.synchronize`).  If a rank
failed, or if ranks compute different things, this raises an error.  Otherwise, a collective operation would never
return.  Rows are exchanged by NCCL if each rank has its own GPU, else by gloo.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedbench.core.options import ConfigError, PeerLost, RunError
from fedbench.core.rng import key

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # for a rank that is still running; a process that ended is noticed at once
log = logging.getLogger(__name__)


class OtherRankFailed(RunError):
    """Another rank failed.  The message is that of its error."""


class Ranks:
    """The processes of a run, in the view of one of them.  Names are those of torch.distributed.

    Without distribution, it is rank 0 of 1, and no method waits for another process.

    Args:
        rank: Index of this process.
        world_size: Number of processes.
        local_rank: Index of this process on its machine.
        local_world_size: Number of processes on this machine.

    Attributes:
        by_owner: Whether computations for a client run on the rank that owns it, which alone stores its samples or
            its states.
        received_bytes: Bytes of tensors that this rank has received from others, messages of `gather` not counted.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0, local_world_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self.by_owner = False
        self.received_bytes = 0
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self._undistributed_depth = 0  # number of active `undistributed` context managers
        self._nccl: dict[torch.device, Any] = {}

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, the only one that writes files and logs."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether several processes divide the computations.  False in a `with undistributed()` block."""
        return self.world_size > 1 and not self._undistributed_depth

    @contextmanager
    def undistributed(self) -> Iterator[None]:
        """Return a context within which this rank computes everything itself, and nothing is exchanged.

        Contexts may be nested.
        """
        self._undistributed_depth += 1
        try:
            yield
        finally:
            self._undistributed_depth -= 1

    # -- division of work --------------------------------------------------------------------------------
    def owner(self, ids: np.ndarray) -> np.ndarray:
        """Return the rank that owns each client: the one that stores its rows or samples if ranks divide them.

        Args:
            ids: Clients, new clients included.  # [k]

        Returns:
            Ranks.  # [k]
        """
        return ids % self.world_size

    def assign(self, work: np.ndarray, ids: np.ndarray | None = None) -> list[np.ndarray]:
        """Assign items to ranks.  The next largest item goes to the rank with the least work.

        Args:
            work: Amount of work of each item.  # [n]
            ids: The client of each item, which goes to the client's owner if `by_owner` is True.  None: items belong
                to no client.  # [n]

        Returns:
            For each rank, the positions of its items, those with more work first.  Without distribution, each rank
            has all items.
        """
        order = np.argsort(-work, kind="stable")
        if not self.is_distributed:
            return [order] * self.world_size
        if self.by_owner and ids is not None:
            owners = self.owner(ids)[order]
            return [order[owners == rank] for rank in range(self.world_size)]
        assigned: list[list[int]] = [[] for _ in range(self.world_size)]
        loads = [(0, rank) for rank in range(self.world_size)]  # a heap: the rank with the least work is the first
        for position, cost in zip(order.tolist(), work[order].tolist()):
            load, rank = loads[0]
            assigned[rank].append(position)
            heapq.heapreplace(loads, (load + max(cost, 1), rank))  # items without work are distributed, too
        return [np.array(positions, np.int64) for positions in assigned]

    def compute_distributed(
        self,
        work: np.ndarray,
        compute: Callable[[np.ndarray], Mapping[str, np.ndarray]],
        ids: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Compute arrays of n items, divided between ranks.

        Args:
            work: Amount of work of each item.  # [n]
            compute: compute(positions [k], ascending) returns arrays [k] by name.
            ids: The client of each item (`assign`).  # [n]

        Returns:
            The arrays of all items, by name, on every rank.  # [n] each
        """
        if not self.is_distributed:
            return dict(compute(np.arange(len(work))))
        mine = np.sort(self.assign(work, ids)[self.rank])  # positions of the items of this rank
        with self.undistributed():
            computed = dict(compute(mine)) if len(mine) else {}
        joined: dict[str, np.ndarray] = {}
        for positions, arrays in self.gather("scores", (mine, computed)):  # of each rank
            for name, values in arrays.items():
                joined.setdefault(name, np.empty((len(work), *values.shape[1:]), values.dtype))[positions] = values
        return joined

    # -- agreement ---------------------------------------------------------------------------------------
    def synchronize(self, what: str, bits: int = 0, failure: str | None = None) -> int:
        """Wait until all ranks call this method.

        Args:
            what: What happens next.  It must be the same on all ranks.
            bits: Flags of this rank.
            failure: Message of an error of this rank, or None.

        Returns:
            The union (bitwise or) of the flags of all ranks.

        Raises:
            OtherRankFailed: Another rank failed, or does something else next.
            PeerLost: Another process ended.
        """
        if not self.is_distributed:
            return bits
        mine = torch.tensor([failure is not None, key(what) >> 1, bits])  # a key has 64 bits without sign, hence >> 1
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        with raising_peer_lost():
            dist.all_gather(gathered, mine)
        has_failed, what_keys, all_bits = torch.stack(gathered, 1).tolist()  # [world_size] each
        if any(has_failed) or len(set(what_keys)) > 1:
            self._raise_other_failure(what, failure)
        return int(np.bitwise_or.reduce(all_bits))

    def _raise_other_failure(self, what: str, failure: str | None) -> None:
        """Raise OtherRankFailed, unless this rank itself failed and will raise its own error.

        Args:
            what: What this rank does next.
            failure: Message of this rank's error, or None.
        """
        states = self._all_gather_object((what, failure))
        failures = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(states) if message is not None]
        if failure is None and failures:
            raise OtherRankFailed(failures[0])
        if failure is None:
            positions = ", ".join(f"rank {rank} is at {position!r}" for rank, (position, _) in enumerate(states))
            raise OtherRankFailed(
                f"the processes no longer compute the same thing: {positions}; start all of them with the same "
                "command and the same version of fedbench"
            )

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they do not wait for it.

        Args:
            error: The error of this rank.  OtherRankFailed and PeerLost are not sent, because the others know of them.
        """
        if self.is_distributed and not isinstance(error, OtherRankFailed | PeerLost):
            message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            with suppress(PeerLost):
                self.synchronize("failure", failure=message or type(error).__name__)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank.

        Args:
            what: Description of the value, the same on all ranks.
            value: The value of this rank, which must be small and picklable.

        Returns:
            The values, in the order of ranks.
        """
        if not self.is_distributed:
            return [value]
        self.synchronize(what)
        return self._all_gather_object(value)

    def _all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in the order of ranks.  All ranks must call this together."""
        values: list[Any] = [None] * self.world_size
        with raising_peer_lost():
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, what: str, value: T) -> T:
        """Return the value of rank 0, on every rank.

        Args:
            what: Description of the value, the same on all ranks.
            value: The value of this rank, small and picklable.  Those of other ranks than 0 are ignored.
        """
        return self.gather(what, value if self.is_first else None)[0]  # the value of rank 0

    def require_equal(self, what: str, value: str) -> None:
        """Check that a value is the same on all ranks.

        Args:
            what: Description of the value.
            value: The value of this rank.

        Raises:
            RunError: The values differ.
        """
        values = self.gather(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RunError(
                    f"rank {rank} has another {what} than rank 0 ({other[:12]}, {values[0][:12]}): copy the data files "
                    "of rank 0 to all machines, and install the same version of fedbench on them"
                )

    def first_on_each_machine(self, work: Callable[[], T]) -> T:
        """Call a function that writes files on the first rank of each machine, and then on the other ranks.

        Args:
            work: The function, which must not return None.  Later calls use the files of the first one.

        Returns:
            The result of this rank's call.
        """
        if not self.is_distributed:
            return work()
        result = work() if self.local_rank == 0 else None
        self.synchronize("first on each machine")
        return work() if result is None else result

    # -- exchange --------------------------------------------------------------------------------------
    def exchange(
        self,
        positions_by_rank: Sequence[np.ndarray],
        results: Mapping[str, Tensor],
        changed: Collection[str] | None = None,
    ) -> set[str]:
        """Exchange rows of tensors between ranks, in place.

        Args:
            positions_by_rank: For each rank, the positions of the rows that it computed.
            results: The tensors by name.  # [n, ...] each
            changed: Names of the tensors that this rank changed.  None: all.  Tensors that no rank changed are not
                sent.

        Returns:
            Names of the tensors that were sent.
        """
        is_changed = [changed is None or name in changed for name in results]  # on this rank
        if not self.is_distributed:
            return {name for name, flag in zip(results, is_changed) if flag}
        device = next(iter(results.values())).device
        group = self._group(device)
        # bit i: whether tensor i has changed, on this rank and then on any rank
        bits = self.synchronize(f"exchange of {', '.join(results)}", sum(c << i for i, c in enumerate(is_changed)))
        changed_anywhere = {name: t for i, (name, t) in enumerate(results.items()) if bits >> i & 1}
        tensors = [t for t in changed_anywhere.values() if t.numel()]
        for source, positions in enumerate(positions_by_rank):
            if len(positions) and tensors:
                self._send_rows(source, torch.from_numpy(positions).to(device), tensors, group)
        return set(changed_anywhere)

    def _send_rows(self, source: int, index: Tensor, tensors: list[Tensor], group: Any) -> None:
        """Send rows of all tensors from one rank to the others, as one tensor of bytes.

        Args:
            source: The rank that computed the rows.
            index: Indices of the rows.  # [k]
            tensors: The tensors, whose rows are replaced on the other ranks.  # [n, ...] each
            group: The NCCL group, or None for gloo.
        """
        row_bytes = [t[:1].numel() * t.element_size() for t in tensors]
        if source == self.rank:
            packed = torch.cat([t[index].view(len(index), -1).view(torch.uint8) for t in tensors], 1)
        else:
            packed = torch.empty(len(index), sum(row_bytes), dtype=torch.uint8, device=index.device)
        packed = self._broadcast(packed, source, group)
        if source != self.rank:
            for t, received in zip(tensors, packed.split(row_bytes, 1)):
                aligned = received.clone(memory_format=torch.contiguous_format)  # view(dtype) needs an aligned address
                t[index] = aligned.view(t.dtype).view(len(index), *t.shape[1:])

    def sum(self, what: str, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, on every rank, by one all_reduce.

        Args:
            what: Description of the tensor, the same on all ranks.
            tensor: The summand of this rank, which is overwritten.  # [...]

        Returns:
            The sum, with equal bytes on all ranks.  # [...]
        """
        if not self.is_distributed:
            return tensor
        group = self._group(tensor.device)
        self.synchronize(f"{what} {[*tensor.shape]}")
        self.received_bytes += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size  # by a ring of processes
        on_host = group is None and tensor.device.type != "cpu"  # gloo needs host memory
        summed = (tensor.cpu() if on_host else tensor).contiguous()
        with raising_peer_lost():
            dist.all_reduce(summed, group=group)
        return summed.to(tensor.device)

    def exchange_lists(
        self, positions_by_rank: Sequence[np.ndarray], items: list[Tensor], device: torch.device
    ) -> None:
        """Exchange the tensors of a list between ranks, in place.  Empty tensors are not sent if a rank has no others.

        Args:
            positions_by_rank: For each rank, the positions of the tensors that it computed.
            items: The tensors, of any length.  # [n_i, ...] each
            device: The compute device.
        """
        if not self.is_distributed:
            return
        group, mine = self._group(device), positions_by_rank[self.rank]
        # the tensors of this rank as one, and its lengths, the other axes and the type, which the other ranks need
        joined = torch.cat([items[i] for i in mine]) if len(mine) else torch.zeros(0, device=device)
        layouts = self.gather("exchange of lists", ([len(items[i]) for i in mine], joined.shape[1:], joined.dtype))
        for source, (positions, (lengths, shape, dtype)) in enumerate(zip(positions_by_rank, layouts)):
            if sum(lengths) == 0:
                continue
            if source == self.rank:
                values = joined.contiguous()
            else:
                values = torch.empty(sum(lengths), *shape, dtype=dtype, device=device)
            values = self._broadcast(values, source, group)
            for i, item in zip(positions, values.split(lengths)):
                items[i] = item

    def _broadcast(self, tensor: Tensor, source: int, group: Any) -> Tensor:
        """Return the tensor of one rank, on every rank.

        Args:
            tensor: On the rank `source` the tensor to send, on the others one of the same shape, which is overwritten.
            source: The rank that sends.
            group: The NCCL group, or None for gloo.
        """
        self.received_bytes += tensor.nbytes if source != self.rank else 0
        with raising_peer_lost():
            if group is not None or tensor.device.type == "cpu":
                dist.broadcast(tensor, source, group=group)
                return tensor
            on_host = tensor.cpu()  # gloo needs host memory
            dist.broadcast(on_host, source)
            return on_host.to(tensor.device)

    def _group(self, device: torch.device) -> Any:
        """Return the group of ranks that exchanges tensors on this device.

        It waits until earlier computations on a GPU have ended.

        Returns:
            A group for NCCL if each rank has its own GPU, else None, which is the group for gloo.
        """
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)  # errors of the device are raised before the ranks synchronize
        if device not in self._nccl:
            devices = self.gather("devices", (socket.gethostname(), str(device)))
            has_own_gpu = len(set(devices)) == self.world_size and dist.is_nccl_available()
            self._nccl[device] = dist.new_group(backend="nccl", timeout=TIMEOUT) if has_own_gpu else None
        return self._nccl[device]


@contextmanager
def raising_peer_lost() -> Iterator[None]:
    """Return a context that turns a RuntimeError of torch.distributed into PeerLost.

    Within it, only calls of torch.distributed should be made: their RuntimeError means that another process ended.
    """
    try:
        yield
    except RuntimeError as error:
        message = (
            "another process of this run has ended or cannot be reached: read its error in the output of torchrun, and "
            "start the run again"
        )
        raise PeerLost(message) from error


_ranks = Ranks()


def current() -> Ranks:
    """Return the `Ranks` that `connect` created; rank 0 of 1 if it was not called or after `disconnect`."""
    return _ranks


def connect() -> Ranks:
    """Join the processes that torchrun started, and return the ranks.

    The environment variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of torchrun must be set.
    """
    global _ranks
    rank, world_size, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if world_size > 1:
        num_restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        with raising_peer_lost():
            store, _, _ = next(rendezvous("env://"))
            # the store survives restarts and still contains addresses of ended processes: hence a new prefix
            attempt = PrefixStore(f"fedbench/{num_restarts}", store)
            dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world_size, timeout=TIMEOUT)
        _ranks = Ranks(rank, world_size, local_rank, local_world_size)
    return _ranks


def disconnect() -> None:
    """Leave the other processes of a distributed run.  `current` then returns this process only."""
    global _ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    _ranks = Ranks()
