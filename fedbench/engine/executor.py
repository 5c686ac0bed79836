"""How the work of a cohort is cut into chunks and run.  Methods never see it; results do not depend on it.

A chunk of clients is computed with batched operations over its clients; chunks run one after the other or in threads.
So `loop` is chunks of one, `vmap` is one chunk, `threads` is chunks of one (or more) in as many Python threads as there
are cores, each with one intra-op thread: the kernels release the interpreter lock, and spinning OpenMP
threads are avoided.  Where several processes share a run (ranks.py), each cuts its own part of the cohort into chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from threading import Event
from typing import Any

import torch

from fedbench.core.cores import cores
from fedbench.core.options import RunError
from fedbench.engine.cuda_graphs import GraphedGradients
from fedbench.engine.gradients import DirectGradients
from fedbench.engine.ranks import Ranks

log = logging.getLogger(__name__)
NAMES = ("loop", "threads", "vmap")
Job = Callable[[int, int], None]  # of the clients start to stop of a cohort


class Stopped(Exception):
    """Another chunk of the cohort has failed, or the run was interrupted."""


@dataclass(frozen=True)
class Plan:
    """One way to compute a cohort.

    name: loop, threads or vmap.  chunk: clients per chunk (0: all).  workers: chunks at a time.  intra: torch threads
    inside a chunk.  graphs: gradients are replayed as CUDA graphs.
    """

    name: str
    chunk: int
    workers: int
    intra: int
    graphs: bool = False

    @classmethod
    def stored(cls, state: Mapping[str, Any]) -> Plan:
        """Return the plan that a run stored (`Executor.state`), without the keys of earlier releases."""
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})

    def __str__(self) -> str:
        size = "all clients" if self.chunk == 0 else f"{self.chunk} client{'s' * (self.chunk > 1)}"
        graphs = ", CUDA graphs" * self.graphs
        return f"{self.name}: {size} a chunk, {self.workers} at a time, {self.intra} intra-op thread(s){graphs}"

    @property
    def short(self) -> str:
        """For the line that says what was timed."""
        return f"{self.name}/{self.chunk or 'all'}/{self.workers}x{self.intra}" + "/graphs" * self.graphs


def plans(
    name: str,
    chunk: int | None,
    threads: int | None,
    device: torch.device,
    cohort: int,
    processes: int = 1,
    graphs: bool | None = None,
) -> list[Plan]:
    """The candidates for a cohort of that many clients where so many processes share the machine.

    name: hardware.executor; "auto": of several.  graphs: hardware.graphs, None: with and without.
    """
    workers = threads or max(1, cores() // processes)
    loop, vmap = Plan("loop", 1, 1, threads or 1), Plan("vmap", chunk or 0, 1, 1)
    in_threads = Plan("threads", chunk or 1, workers, 1)
    if name != "auto":
        candidates = [{"loop": loop, "threads": in_threads, "vmap": vmap}[name]]
    elif device.type != "cpu":
        candidates = [vmap, loop]
    elif cohort >= workers:
        candidates = [vmap, in_threads]
    else:
        # more than one intra-op thread on small operations waits for spinning threads: up to 100 times slower whenever
        # another process runs, so it is a candidate only where clients cannot fill the cores
        candidates = [vmap, in_threads, Plan("loop", 1, 1, workers)]
    return [
        replace(plan, graphs=with_graphs) for plan in candidates for with_graphs in _graph_choices(plan, device, graphs)
    ]


def _graph_choices(plan: Plan, device: torch.device, graphs: bool | None) -> tuple[bool, ...]:
    """With CUDA graphs or without; recordings have one set of places for tensors, and threads would need several."""
    if device.type != "cuda" or plan.workers > 1:
        return (False,)
    return (True, False) if graphs is None else (graphs,)


class Executor:
    """Runs a job for every chunk of a cohort.

    gradients: how a chunk's are computed.  ranks: the processes that share the run (None: this one alone).
    """

    def __init__(self, plan: Plan, device: torch.device, ranks: Ranks | None = None):
        self.plan, self.device, self.ranks = plan, device, ranks or Ranks()
        self.chunk = plan.chunk
        self.gradients: DirectGradients = (
            GraphedGradients() if plan.graphs and device.type == "cuda" else DirectGradients()
        )
        self._stop = Event()  # set when a chunk has failed
        self.claim()  # for the server's algebra too, from the first round of a resumed run on
        # oneDNN's OpenMP takes its thread count from the calling thread, so every worker has to set its own
        self.pool = (
            ThreadPoolExecutor(plan.workers, "clients", torch.set_num_threads, (plan.intra,))
            if plan.workers > 1
            else None
        )

    def claim(self) -> None:
        """Set torch's intra-op threads to the plan's: split over another number, a sum has another last digit."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.plan.intra)

    def run(self, job: Job, count: int, single: bool = False) -> None:
        """Call job on [0, count) cut into chunks, without gradients.

        Threads take the chunks in order: the one with most steps should come first.  A chunk that does not fit in
        memory is halved and run again, so a job must not change its inputs, and must write its results last.

        Args:
            job: Computes the clients from start to stop.  It calls `raise_if_stopped` between its steps.
            count: Number of clients.
            single: Whether chunks have one client, whatever the plan.

        Raises:
            RunError: A single client does not fit in memory.
            Exception: The first one that a job raised.
            KeyboardInterrupt: A signal arrived.  All threads have ended their step.
        """
        if count == 0:
            return
        self.claim()  # another executor may have run since
        self._stop.clear()
        size = 1 if single else self.chunk or count
        chunks = [(a, min(a + size, count)) for a in range(0, count, size)]
        if self.pool is not None and len(chunks) > 1:
            self._run_in_threads(self.pool, job, chunks)
        else:
            for a, b in chunks:
                self._run_within_memory(job, a, b)

    def raise_if_stopped(self) -> None:
        """Raise Stopped if another chunk of the cohort has failed."""
        if self._stop.is_set():
            raise Stopped

    def _run_in_threads(self, pool: ThreadPoolExecutor, job: Job, chunks: list[tuple[int, int]]) -> None:
        errors: list[BaseException] = []

        def run(a: int, b: int) -> None:
            try:
                self.raise_if_stopped()
                self._run_within_memory(job, a, b)
            except Stopped:
                pass
            except BaseException as error:
                errors.append(error)
                self._stop.set()

        futures: list[Future[None]] = []
        try:
            for a, b in chunks:
                futures.append(pool.submit(run, a, b))
            wait(futures)
        except BaseException:  # an interrupt, or no thread could be started
            self._stop.set()
            wait(futures)
            raise
        if errors:
            raise errors[0]

    @torch.no_grad()
    def _run_within_memory(self, job: Job, a: int, b: int) -> None:
        """Run a chunk, or its halves one after the other if it does not fit in memory."""
        try:
            return job(a, b)
        except (torch.OutOfMemoryError, MemoryError):
            if b - a == 1:
                raise RunError(
                    "out of memory with a single client at a time: lower local.batch_size or "
                    "eval.batch_size, or choose a smaller model or hardware.device=cpu"
                ) from None
            half = (b - a + 1) // 2  # outside of this block, the exception no longer holds the chunk's tensors
        self.chunk = min(self.chunk or half, half)
        log.warning("out of memory with %d clients at once: going on with %d", b - a, half)
        self.gradients.free_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for start in range(a, b, half):
            self._run_within_memory(job, start, min(start + half, b))

    def close(self) -> None:
        """End the threads, if there are any."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict:
        """The plan as plain values, stored with the run so that a resumed run computes the same way."""
        return asdict(self.plan) | {"chunk": self.chunk}
