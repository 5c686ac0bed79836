"""The processes that share one run: a rank for each GPU, on one machine or on several, started by torchrun.

    torchrun --nproc-per-node=4 -m fedbench hardware=ddp algorithm=pgfed

Every rank holds all data and all state and runs the same simulation: server algebra, evaluation and the lazy rows are
replicated, and equal because every draw is keyed.  What is computed per client (local training, whole splits, scores)
is divided: every client is assigned to a rank, balanced by their work, and the ranks exchange what they computed,
nothing else.  So methods see no rank, and results are those of one process.

Rank 0 reads the command, writes the files and prints; the others follow (`simulation/processes.py`).  Before data are
exchanged, all ranks synchronize over gloo (`Ranks.synchronize`).  A rank that failed or was killed, and ranks that no
longer compute the same thing, therefore end the run with a sentence instead of a collective operation that never
returns.  Rows travel by NCCL between GPUs, by gloo between CPUs or where ranks share a GPU.
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
TIMEOUT = timedelta(hours=2)  # that a rank waits for another which is alive; a dead one is noticed at once
log = logging.getLogger(__name__)


class Stopped(RunError):
    """Another rank could not go on; the sentence is its own."""


class Ranks:
    """The processes of a run, seen by one of them: rank of size processes, local of local_size on this machine.

    One process is rank 0 of 1, and every call returns at once.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, local_size: int = 1):
        self.rank, self.size, self.local, self.local_size = rank, size, local, local_size
        self._alone = 0
        self._nccl: dict[torch.device, Any] = {}

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether what is computed now is divided between processes."""
        return self.size > 1 and not self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this rank computes everything by itself, and nothing is exchanged."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    # -- who does what -----------------------------------------------------------------------------------
    def assign(self, work: np.ndarray) -> list[np.ndarray]:
        """The positions in work [n] that each rank computes, most work first: each goes to the rank that has least.

        A rank that is alone computes all of them.
        """
        order = np.argsort(-work, kind="stable")
        if not self.is_distributed:
            return [order] * self.size
        assigned: list[list[int]] = [[] for _ in range(self.size)]
        loads = [(0, rank) for rank in range(self.size)]
        for position, cost in zip(order.tolist(), work[order].tolist()):
            load, rank = loads[0]
            assigned[rank].append(position)
            heapq.heapreplace(loads, (load + max(cost, 1), rank))
        return [np.array(positions, np.int64) for positions in assigned]

    def compute_divided(
        self, work: np.ndarray, compute: Callable[[np.ndarray], Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """compute(positions [k], ascending) -> arrays [k], on every rank for its positions; joined, [n] each."""
        if not self.is_distributed:
            return dict(compute(np.arange(len(work))))
        mine = np.sort(self.assign(work)[self.rank])
        with self.alone():
            computed = dict(compute(mine)) if len(mine) else {}
        joined: dict[str, np.ndarray] = {}
        for positions, arrays in self.gather("scores", (mine, computed)):
            for name, values in arrays.items():
                joined.setdefault(name, np.empty((len(work), *values.shape[1:]), values.dtype))[positions] = values
        return joined

    # -- agreeing ----------------------------------------------------------------------------------------
    def synchronize(self, what: str, bits: int = 0, failure: str | None = None) -> int:
        """Wait until all ranks are here, to do `what`; returns the union of their bits.

        Raises Stopped on the other ranks if one says that it failed, and PeerLost if one has ended.
        """
        if not self.is_distributed:
            return bits
        mine = torch.tensor([failure is not None, key(what) >> 1, bits])
        each = [torch.empty_like(mine) for _ in range(self.size)]
        with peers_needed():
            dist.all_gather(each, mine)
        failed, place, union = torch.stack(each, 1).tolist()
        if any(failed) or len(set(place)) > 1:
            self._raise_disagreement(what, failure)
        return int(np.bitwise_or.reduce(union))

    def _raise_disagreement(self, what: str, failure: str | None) -> None:
        """Stopped, with what went wrong, on those who did not fail themselves."""
        said = self._objects((what, failure))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text is not None]
        if failure is None and failed:
            raise Stopped(failed[0])
        if failure is None:
            places = ", ".join(f"rank {rank} is at {place!r}" for rank, (place, _) in enumerate(said))
            raise Stopped(f"the ranks no longer compute the same thing: {places}")

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, unless they know, or cannot be reached."""
        if self.is_distributed and not isinstance(error, Stopped | PeerLost):
            sentence = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            with suppress(PeerLost):
                self.synchronize("failure", failure=sentence or type(error).__name__)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value (small, picklable)."""
        if not self.is_distributed:
            return [value]
        self.synchronize(what)
        return self._objects(value)

    def _objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with peers_needed():
            dist.all_gather_object(values, value)
        return values

    def decide(self, what: str, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather(what, value if self.first else None)[0]

    def agree(self, what: str, value: str) -> None:
        """Refuse to go on where ranks have different values."""
        values = self.gather(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RunError(
                    f"rank {rank} has another {what} than rank 0 ({other[:12]}, {values[0][:12]}): "
                    "its machine has other data files or another version of fedbench"
                )

    def first_on_each_machine(self, work: Callable[[], T]) -> T:
        """work() on the first rank of every machine, then on the others: what it writes to disk is written once."""
        if not self.is_distributed:
            return work()
        done = work() if self.local == 0 else None
        self.synchronize("first on each machine")
        return work() if done is None else done

    # -- exchanging --------------------------------------------------------------------------------------
    def exchange(
        self, assigned: Sequence[np.ndarray], results: Mapping[str, Tensor], written: Collection[str] | None = None
    ) -> set[str]:
        """Give all ranks the rows of results [n, ...] that each computed: those at assigned[r] are rank r's.

        written: the names whose rows this rank changed (None: all); what no rank changed is not sent.  Returns the
        names that were.
        """
        changed = [written is None or name in written for name in results]
        if not self.is_distributed:
            return {name for name, is_changed in zip(results, changed) if is_changed}
        device = next(iter(results.values())).device
        group = self._group(device)
        bits = self.synchronize(f"exchange of {', '.join(results)}", sum(c << i for i, c in enumerate(changed)))
        changed_anywhere = {name: t for i, (name, t) in enumerate(results.items()) if bits >> i & 1}
        tensors = [t for t in changed_anywhere.values() if t.numel()]
        for source, positions in enumerate(assigned):
            if len(positions) and tensors:
                self._send_rows(source, torch.from_numpy(positions).to(device), tensors, group)
        return set(changed_anywhere)

    def _send_rows(self, source: int, where: Tensor, tensors: list[Tensor], group: Any) -> None:
        """Send the rows at `where` of all tensors from one rank to the others, side by side as bytes."""
        widths = [t[:1].numel() * t.element_size() for t in tensors]
        if source == self.rank:
            packed = torch.cat([t[where].view(len(where), -1).view(torch.uint8) for t in tensors], 1)
        else:
            packed = torch.empty(len(where), sum(widths), dtype=torch.uint8, device=where.device)
        packed = self._broadcast(packed, source, group)
        if source != self.rank:
            for t, part in zip(tensors, packed.split(widths, 1)):
                aligned = part.clone(memory_format=torch.contiguous_format)  # at an address that suits t's numbers
                t[where] = aligned.view(t.dtype).view(len(where), *t.shape[1:])

    def exchange_lists(self, assigned: Sequence[np.ndarray], items: list[Tensor], device: torch.device) -> None:
        """Give all ranks the tensors items[i] [any length, ...], those at assigned[r] being rank r's."""
        if not self.is_distributed:
            return
        group, mine = self._group(device), assigned[self.rank]
        joined = torch.cat([items[i] for i in mine]) if len(mine) else torch.zeros(0, device=device)
        shapes = self.gather("exchange of lists", ([len(items[i]) for i in mine], joined.shape[1:], joined.dtype))
        for source, (positions, (lengths, tail, dtype)) in enumerate(zip(assigned, shapes)):
            if sum(lengths) == 0:
                continue
            if source == self.rank:
                values = joined.contiguous()
            else:
                values = torch.empty(sum(lengths), *tail, dtype=dtype, device=device)
            values = self._broadcast(values, source, group)
            for i, part in zip(positions, values.split(lengths)):
                items[i] = part

    def _broadcast(self, tensor: Tensor, source: int, group: Any) -> Tensor:
        with peers_needed():
            if group is not None or tensor.device.type == "cpu":
                dist.broadcast(tensor, source, group=group)
                return tensor
            host = tensor.cpu()  # gloo: through host memory
            dist.broadcast(host, source)
            return host.to(tensor.device)

    def _group(self, device: torch.device) -> Any:
        """NCCL where every rank has a GPU of its own, else None: gloo.  All that was computed here is done."""
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)  # a rank that dies does so before the ranks synchronize
        if device not in self._nccl:
            places = self.gather("devices", (socket.gethostname(), str(device)))
            one_each = len(set(places)) == self.size and dist.is_nccl_available()
            self._nccl[device] = dist.new_group(backend="nccl", timeout=TIMEOUT) if one_each else None
        return self._nccl[device]


@contextmanager
def peers_needed() -> Iterator[None]:
    """What torch raises when another process cannot be reached, as a sentence."""
    try:
        yield
    except RuntimeError as error:
        sentence = "another process of this run has ended or cannot be reached (torchrun says which one, and how)"
        raise PeerLost(sentence) from error


_ranks = Ranks()


def current() -> Ranks:
    """The ranks of this process: one, unless torchrun started several."""
    return _ranks


def connect() -> Ranks:
    """Join the processes that torchrun started, as its environment variables say."""
    global _ranks
    rank, size, local, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if size > 1:
        started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        with peers_needed():
            store, _, _ = next(rendezvous("env://"))  # kept over restarts, with addresses of ended processes
            attempt = PrefixStore(f"fedbench/{started}", store)
            dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size, timeout=TIMEOUT)
        _ranks = Ranks(rank, size, local, local_size)
    return _ranks


def disconnect() -> None:
    """Leave them; this process is alone again."""
    global _ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    _ranks = Ranks()
