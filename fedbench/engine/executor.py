"""How the work of a cohort is cut and run.  Methods never see this room; results do not depend on it.

A cohort is cut into chunks of clients; a chunk is computed with batched operations over its clients; chunks
run one after the other or in threads.  So `loop` is chunks of one, `vmap` is one chunk, `threads` is chunks of
one (or more) in as many Python threads as there are cores (balance.py), each with one intra-op thread: the kernels
release the interpreter lock, and spinning OpenMP threads are avoided.  Where several processes share a run
(ranks.py), what is cut into chunks is this one's share of the cohort.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from fedbench.core.options import RunError
from fedbench.engine.gradients import Direct, Graphs
from fedbench.engine.ranks import Ranks
from fedbench.engine.threads import Steps, advance, spread

log = logging.getLogger(__name__)
NAMES = ("loop", "threads", "vmap")


@dataclass(frozen=True)
class Plan:
    """name; chunk: clients per chunk (0: all); workers: chunks at a time; intra: torch threads inside a chunk; graphs:
    gradients replayed as CUDA graphs; convolution: of several clients at once (FlatModel.convolution)."""

    name: str
    chunk: int
    workers: int
    intra: int
    graphs: bool = False
    convolution: str = "grouped"

    def __str__(self) -> str:
        size = "all clients" if self.chunk == 0 else f"{self.chunk} client{'s' * (self.chunk > 1)}"
        more = ", CUDA graphs" * self.graphs + ", unfolded convolutions" * (self.convolution == "unfold")
        return f"{self.name}: {size} a chunk, {self.workers} at a time, {self.intra} intra-op thread(s){more}"

    @property
    def short(self) -> str:
        """For the line that says what was timed."""
        more = "/graphs" * self.graphs + f"/{self.convolution}" * (self.convolution != "grouped")
        return f"{self.name}/{self.chunk or 'all'}/{self.workers}x{self.intra}{more}"


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plans(name: str, chunk: int | None, threads: int | None, device: torch.device, cohort: int, processes: int = 1,
          graphs: bool | None = None, convolutions: bool = False) -> list[Plan]:
    """The candidates for a cohort of that many clients where so many processes share the machine: one where
    hardware.executor names it, but for what hardware.graphs=auto (None) leaves open and the ways to compute
    convolutions of several clients (of a model that has convolutions)."""
    n = threads or max(1, cores() // processes)
    known = {"loop": [Plan("loop", 1, 1, threads or 1)],
             "threads": [Plan("threads", chunk or 1, n, 1)],
             "vmap": [Plan("vmap", chunk or 0, 1, 1)]}
    if device.type == "cpu":
        # more than one intra-op thread on small operations waits for spinning threads: up to 100 times slower whenever
        # another process runs, so it is a candidate only where clients cannot fill the cores
        auto = [*known["vmap"], *known["threads"], *([Plan("loop", 1, 1, n)] if cohort < n else [])]
    else:
        auto = [*known["vmap"], *known["loop"]]
    found = auto if name == "auto" else known[name]
    if convolutions and device.type != "cpu":            # where unfolding was never the faster one
        found = [replace(p, convolution=way) for p in found
                 for way in (("grouped", "unfold") if p.chunk != 1 else ("grouped",))]
    ways = (True, False) if graphs is None else (graphs,)
    return [replace(p, graphs=way) for p in found          # recordings have one set of places: none for threads
            for way in (ways if device.type == "cuda" and p.workers == 1 else (False,))]


@functools.cache
def keep_freed_memory() -> bool:
    """Let the C library reuse freed activations instead of returning them to the system after every step.

    glibc unmaps large blocks, and gives threads arenas that cannot hold them, so each step paid for fresh pages: 1.2
    times the images per CPU second for FedAvgCNN in batches of 256, 1.04 in batches of 10 (135,000 page faults: 1).
    Elsewhere than on glibc nothing changes.  Returns whether it could be set.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    return bool(mallopt(mmap_threshold, 1 << 30) & mallopt(trim_threshold, (1 << 31) - 1) & mallopt(arena_max, 1))


class Executor:
    """Runs job(start, stop) for every chunk of K clients; gradients: how a chunk's are computed.  ranks: who else
    computes for this run (None: nobody)."""

    def __init__(self, plan: Plan, device: torch.device, ranks: Ranks | None = None):
        self.plan, self.device, self.ranks = plan, device, ranks or Ranks()
        self.chunk = plan.chunk
        self.gradients: Direct = Graphs() if plan.graphs and device.type == "cuda" else Direct()
        if device.type == "cpu":
            keep_freed_memory()
        self.claim()                    # for the server's algebra too, from the first round of a resumed run on
        # oneDNN's OpenMP takes its thread count from the calling thread, so every worker has to set its own
        self.pool = ThreadPoolExecutor(plan.workers, "clients", torch.set_num_threads, (plan.intra,)) \
            if plan.workers > 1 else None

    def claim(self) -> None:
        """Set torch's intra-op threads to the plan's: split over another number, a sum has another last digit."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.plan.intra)

    def run(self, job: Callable[[int, int], Steps | None], count: int, steps: np.ndarray | None = None,
            pieces: bool = False) -> None:
        """Call job on [0, count) cut into chunks, without gradients.  A job yields between its steps, of which the
        first client of a chunk has the most, steps[a] (None: it is one step), so that it can go on in another thread.
        A chunk that does not fit in memory is halved and run again, so a job must leave its inputs alone and write its
        results last.  pieces: single items, always."""
        if count == 0:
            return
        self.claim()                    # another executor may have run since
        size = 1 if pieces else self.chunk or count
        edges = [(a, min(a + size, count)) for a in range(0, count, size)]
        if self.pool is not None and len(edges) > 1:
            lengths = [1 if steps is None else int(steps[a]) for a, _ in edges]
            spread(self.pool, self.plan.workers, lambda i: self._fit(job, *edges[i]), lengths)
        else:
            for a, b in edges:
                advance(self._fit(job, a, b))

    def _fit(self, job: Callable[[int, int], Steps | None], a: int, b: int) -> Steps:
        try:
            yield from job(a, b) or ()
        except (torch.OutOfMemoryError, MemoryError):
            if b - a == 1:
                raise RunError("out of memory with a single client at a time: lower local.batch_size or "
                               "eval.batch_size, or choose a smaller model or hardware.device=cpu") from None
            half = (b - a + 1) // 2
        else:
            return
        self.chunk = min(self.chunk or half, half)
        log.warning("out of memory with %d clients at once: going on with %d", b - a, half)
        self.gradients.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for start in range(a, b, half):
            yield from self._fit(job, start, min(start + half, b))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict:
        """The plan as plain values, stored with the run so that a resumed run computes the same way."""
        return asdict(self.plan) | {"chunk": self.chunk}
