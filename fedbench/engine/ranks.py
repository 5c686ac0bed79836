"""The processes that share one run: a rank for each GPU, on one machine or on several, started by torchrun.

    torchrun --nproc-per-node=4 -m fedbench hardware=ddp algorithm=pgfed

Every rank holds all data and all state and runs the same simulation: server algebra, evaluation and the lazy rows are
replicated, and equal because every draw is keyed.  What is computed per client (local training, whole splits, scores)
is divided: a rank computes its share of the clients, balanced by their work, and the ranks exchange what they
computed, nothing else.  So methods see no rank, and results are those of one process.

Rank 0 reads the command, writes the files and prints; the others follow it (`follow`).  Before anything is exchanged
all ranks meet over gloo (`Ranks.meet`): so a rank that failed or was killed, and ranks that no longer compute the
same thing, end the run with a sentence instead of a collective operation that never returns.  Rows travel by NCCL
between GPUs, by gloo between CPUs or where ranks share a GPU.
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

from fedbench.core.options import ConfigError, PeerLost, RunError
from fedbench.core.rng import key

T = TypeVar("T")
PATIENCE = timedelta(hours=2)          # that a rank waits for another which is alive; a dead one is noticed at once
log = logging.getLogger(__name__)


class Stopped(RunError):
    """Another rank could not go on; the sentence is its own."""


class Ranks:
    """rank of size processes; local of local_size on this machine.  One process: rank 0 of 1, and every call returns
    at once."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, local_size: int = 1):
        self.rank, self.size, self.local, self.local_size = rank, size, local, local_size
        self._alone = 0
        self._nccl: dict[torch.device, Any] = {}

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether what is computed now is divided."""
        return self.size > 1 and not self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is computed inside is this rank's own, and nothing is exchanged."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    # -- who does what -----------------------------------------------------------------------------------
    def share(self, work: np.ndarray) -> list[np.ndarray]:
        """The positions in work [n] that each rank computes, most work first: each goes to the rank that has least.

        A rank that is alone computes all of them.
        """
        order = np.argsort(-work, kind="stable")
        if not self.together:
            return [order] * self.size
        shares: list[list[int]] = [[] for _ in range(self.size)]
        loads = [(0, rank) for rank in range(self.size)]
        for position, cost in zip(order.tolist(), work[order].tolist()):
            load, rank = loads[0]
            shares[rank].append(position)
            heapq.heapreplace(loads, (load + max(cost, 1), rank))
        return [np.array(share, np.int64) for share in shares]

    def spread(self, work: np.ndarray, compute: Callable[[np.ndarray], Mapping[str, np.ndarray]]
               ) -> dict[str, np.ndarray]:
        """compute(positions [k], ascending) -> arrays [k], on every rank for its share; joined, [n] each."""
        if not self.together:
            return dict(compute(np.arange(len(work))))
        mine = np.sort(self.share(work)[self.rank])
        with self.alone():
            found = dict(compute(mine)) if len(mine) else {}
        joined: dict[str, np.ndarray] = {}
        for where, arrays in self.gather("scores", (mine, found)):
            for name, values in arrays.items():
                joined.setdefault(name, np.empty((len(work), *values.shape[1:]), values.dtype))[where] = values
        return joined

    # -- meeting -----------------------------------------------------------------------------------------
    def meet(self, what: str, bits: int = 0, failure: str | None = None) -> int:
        """Wait until all ranks are here, to do `what`; returns the union of their bits.

        Raises Stopped on the other ranks if one says that it failed, and PeerLost if one has ended.
        """
        if not self.together:
            return bits
        here = torch.tensor([failure is not None, key(what) >> 1, bits])
        found = [torch.empty_like(here) for _ in range(self.size)]
        with reaching():
            dist.all_gather(found, here)
        failed, place, union = torch.stack(found, 1).tolist()
        if any(failed) or len(set(place)) > 1:
            self._part(what, failure)
        return int(np.bitwise_or.reduce(union))

    def _part(self, what: str, failure: str | None) -> None:
        """Say what went wrong to those who did not fail themselves."""
        said = self._objects((what, failure))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text is not None]
        if failure is None and failed:
            raise Stopped(failed[0])
        if failure is None:
            places = ", ".join(f"rank {rank} is at {place!r}" for rank, (place, _) in enumerate(said))
            raise Stopped(f"the ranks no longer compute the same thing: {places}")

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, unless they know, or cannot be reached."""
        if self.together and not isinstance(error, Stopped | PeerLost):
            sentence = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            with suppress(PeerLost):
                self.meet("failure", failure=sentence or type(error).__name__)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value (small, picklable)."""
        if not self.together:
            return [value]
        self.meet(what)
        return self._objects(value)

    def _objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with reaching():
            dist.all_gather_object(found, value)
        return found

    def decide(self, what: str, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather(what, value if self.first else None)[0]

    def agree(self, what: str, value: str) -> None:
        """Refuse to go on where ranks have different values."""
        values = self.gather(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RunError(f"rank {rank} has another {what} than rank 0 ({other[:12]}, {values[0][:12]}): "
                               "its machine has other data files or another version of fedbench")

    def in_turn(self, work: Callable[[], T]) -> T:
        """work() on the first rank of every machine, then on the others: what it writes is written once."""
        if not self.together:
            return work()
        done = work() if self.local == 0 else None
        self.meet("taking turns")
        return work() if done is None else done

    # -- exchanging --------------------------------------------------------------------------------------
    def exchange(self, shares: Sequence[np.ndarray], results: Mapping[str, Tensor],
                 written: Collection[str] | None = None) -> set[str]:
        """Give all ranks the rows of results [n, ...] that each computed: those at shares[r] are rank r's.

        written: the names whose rows this rank changed (None: all); what no rank changed stays at home.  Returns the
        names that all ranks have now.
        """
        changed = [written is None or name in written for name in results]
        if not self.together:
            return {name for name, c in zip(results, changed) if c}
        device = next(iter(results.values())).device
        group = self._group(device)
        bits = self.meet(f"exchange of {', '.join(results)}", sum(c << i for i, c in enumerate(changed)))
        moved = {name: t for i, (name, t) in enumerate(results.items()) if bits >> i & 1}
        tensors = [t for t in moved.values() if t.numel()]
        for source, where in enumerate(shares):
            if len(where) and tensors:
                self._hand_round(source, torch.from_numpy(where).to(device), tensors, group)
        return set(moved)

    def _hand_round(self, source: int, where: Tensor, tensors: list[Tensor], group: Any) -> None:
        """The rows at `where` of all tensors go from one rank to the others, side by side as bytes."""
        widths = [t[:1].numel() * t.element_size() for t in tensors]
        if source == self.rank:
            packed = torch.cat([t[where].view(len(where), -1).view(torch.uint8) for t in tensors], 1)
        else:
            packed = torch.empty(len(where), sum(widths), dtype=torch.uint8, device=where.device)
        packed = self._broadcast(packed, source, group)
        if source != self.rank:
            for t, part in zip(tensors, packed.split(widths, 1)):
                own = part.clone(memory_format=torch.contiguous_format)        # at an address that suits t's numbers
                t[where] = own.view(t.dtype).view(len(where), *t.shape[1:])

    def exchange_lists(self, shares: Sequence[np.ndarray], items: list[Tensor], device: torch.device) -> None:
        """Give all ranks the tensors items[i] [any length, ...], those at shares[r] being rank r's."""
        if not self.together:
            return
        group, mine = self._group(device), shares[self.rank]
        whole = torch.cat([items[i] for i in mine]) if len(mine) else torch.zeros(0, device=device)
        facts = self.gather("exchange of lists", ([len(items[i]) for i in mine], whole.shape[1:], whole.dtype))
        for source, (where, (lengths, tail, dtype)) in enumerate(zip(shares, facts)):
            if sum(lengths) == 0:
                continue
            own = whole.contiguous() if source == self.rank else torch.empty(sum(lengths), *tail, dtype=dtype,
                                                                             device=device)
            own = self._broadcast(own, source, group)
            for i, part in zip(where, own.split(lengths)):
                items[i] = part

    def _broadcast(self, tensor: Tensor, source: int, group: Any) -> Tensor:
        with reaching():
            if group is not None or tensor.device.type == "cpu":
                dist.broadcast(tensor, source, group=group)
                return tensor
            host = tensor.cpu()                        # gloo: through host memory
            dist.broadcast(host, source)
            return host.to(tensor.device)

    def _group(self, device: torch.device) -> Any:
        """NCCL where every rank has a GPU of its own, else None: gloo.  All that was computed here is done."""
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)                 # a rank that dies does so before the ranks meet
        if device not in self._nccl:
            places = self.gather("devices", (socket.gethostname(), str(device)))
            own = len(set(places)) == self.size and dist.is_nccl_available()
            self._nccl[device] = dist.new_group(backend="nccl", timeout=PATIENCE) if own else None
        return self._nccl[device]


@contextmanager
def reaching() -> Iterator[None]:
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
    rank, size, local, local_size = (int(os.environ[name]) for name in
                                     ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if size > 1:
        with reaching():
            dist.init_process_group("gloo", timeout=PATIENCE)
        _ranks = Ranks(rank, size, local, local_size)
    return _ranks


def disconnect() -> None:
    """Leave them; this process is alone again."""
    global _ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    _ranks = Ranks()


