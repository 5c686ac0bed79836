"""Executors divide the clients of a cohort into chunks, each of which is computed at once, for example by torch.vmap.

Results do not depend on the executor, up to rounding.

The clients of a chunk are computed by batched operations:
  - loop: chunks of one client, one after the other;
  - vmap: one chunk of all clients;
  - threads: chunks of one client (or more) in as many Python threads as there are cores.  Each thread has one intra-op
    thread, because threads of OpenMP would wait for each other.  Kernels release the interpreter lock.

In a distributed run (ranks.py), each process divides its own clients into chunks.
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
EXECUTORS = ("loop", "threads", "vmap")
Job = Callable[[int, int], None]  # computes the clients from start to stop (exclusive)


class Cancelled(Exception):
    """Another chunk of the cohort failed, or the run was interrupted."""


@dataclass(frozen=True)
class Plan:
    """How to compute a cohort.

    Attributes:
        name: "loop", "threads" or "vmap".
        chunk: Number of clients in a chunk.  0: all.
        workers: Number of chunks that are computed at the same time.
        intra: Number of intra-op threads of torch in each worker.
        graphs: Whether gradients are CUDA graphs.
    """

    name: str
    chunk: int
    workers: int
    intra: int
    graphs: bool = False

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Plan:
        """Return the plan from the dict that `Executor.state` returned, for example in a checkpoint.

        Keys that are no fields of a plan are ignored.
        """
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})

    def __str__(self) -> str:
        size = "all clients" if self.chunk == 0 else f"{self.chunk} client{'s' * (self.chunk > 1)}"
        graphs = ", CUDA graphs" * self.graphs
        return f"{self.name}: {size} a chunk, {self.workers} at a time, {self.intra} intra-op thread(s){graphs}"

    @property
    def short_name(self) -> str:
        """A short description, such as "threads/1/4x1" or "vmap/all/1x1/graphs".

        Parts: name, clients in a chunk, workers x intra-op threads of each, and "graphs" if gradients are CUDA graphs.
        """
        return f"{self.name}/{self.chunk or 'all'}/{self.workers}x{self.intra}" + "/graphs" * self.graphs


def candidate_plans(
    name: str,
    chunk: int | None,
    threads: int | None,
    device: torch.device,
    cohort_size: int,
    num_processes: int = 1,
    graphs: bool | None = None,
) -> list[Plan]:
    """Return the plans among which a run selects the fastest one.

    Args:
        name: hardware.executor.  "auto" has several candidates.
        chunk: Number of clients in a chunk, hardware.chunk.  None: all for vmap, one for threads; loop always has one.
        threads: hardware.threads.  None: the number of cores.
        device: The compute device.
        cohort_size: Number of clients of a round in this process.
        num_processes: Number of processes on the machine.
        graphs: hardware.graphs.  None: plans with and without CUDA graphs.

    Returns:
        At least one plan.
    """
    workers = threads or max(1, cores() // num_processes)
    # chunk: clients in a chunk, 0 for all; workers: chunks at the same time; intra: threads of torch in each
    loop = Plan("loop", chunk=1, workers=1, intra=threads or 1)
    vmap = Plan("vmap", chunk=chunk or 0, workers=1, intra=1)
    in_threads = Plan("threads", chunk=chunk or 1, workers=workers, intra=1)
    if name != "auto":
        candidates = [{"loop": loop, "threads": in_threads, "vmap": vmap}[name]]
    elif device.type != "cpu":
        candidates = [vmap, loop]
    elif cohort_size >= workers:
        candidates = [vmap, in_threads]
    else:
        # several intra-op threads are slow if another process uses their cores: only for fewer clients than cores
        candidates = [vmap, in_threads, replace(loop, intra=workers)]
    return [
        replace(plan, graphs=with_graphs) for plan in candidates for with_graphs in _graph_choices(plan, device, graphs)
    ]


def _graph_choices(plan: Plan, device: torch.device, graphs: bool | None) -> tuple[bool, ...]:
    """Return the values of Plan.graphs to try.

    Args:
        plan: The plan.  Threads cannot use graphs, because all would write to one set of static buffers.
        device: The compute device.
        graphs: hardware.graphs.  None: try both.
    """
    if device.type != "cuda" or plan.workers > 1:
        return (False,)
    return (True, False) if graphs is None else (graphs,)


class Executor:
    """Runs a job for each chunk of a cohort, in the threads of `pool` if there are any, until one fails (`_stop`).

    Args:
        plan: How to compute a cohort.
        device: The compute device.
        ranks: The processes of the run.  None: this process only.

    Attributes:
        chunk: Number of clients in a chunk.  It decreases if memory is exhausted.  0: all.
        gradients: Computes the gradients of a step.
        pool: The threads, or None.
    """

    def __init__(self, plan: Plan, device: torch.device, ranks: Ranks | None = None):
        self.plan, self.device, self.ranks = plan, device, ranks or Ranks()
        self.chunk = plan.chunk
        self.gradients: DirectGradients = (
            GraphedGradients() if plan.graphs and device.type == "cuda" else DirectGradients()
        )
        self._stop = Event()  # set after a chunk failed
        self.set_num_threads()  # also for the server's computations in the first round of a resumed run
        # the number of intra-op threads is a property of the calling thread, so that every worker must set it
        self.pool = (
            ThreadPoolExecutor(plan.workers, "clients", torch.set_num_threads, (plan.intra,))
            if plan.workers > 1
            else None
        )

    def set_num_threads(self) -> None:
        """On a CPU, set torch's number of intra-op threads to `plan.intra`, on which the rounding of sums depends."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.plan.intra)

    def run(self, job: Job, count: int, single: bool = False) -> None:
        """Call a job for each chunk of the clients 0 to count - 1, without recording gradients.

        Threads take the chunks in order.  The one with most steps should be the first.  If memory is exhausted, a
        chunk is divided in two and computed again.  A job must therefore not change its inputs, and must write its
        results last.

        Args:
            job: Computes the clients from start to stop.  It calls `raise_if_stopped` between its steps.
            count: Number of clients.
            single: Whether chunks have one client, regardless of the plan.

        Raises:
            RunError: A single client does not fit in memory.
            Exception: The first exception of a job.
            KeyboardInterrupt: A signal arrived.  All threads have finished their step.
        """
        if count == 0:
            return
        self.set_num_threads()  # another executor may have changed it
        self._stop.clear()
        size = 1 if single else self.chunk or count  # self.chunk: clients in a chunk, 0 for all
        chunks = [(start, min(start + size, count)) for start in range(0, count, size)]
        if self.pool is not None and len(chunks) > 1:
            self._run_in_threads(self.pool, job, chunks)
        else:
            for start, stop in chunks:
                self._run_within_memory(job, start, stop)

    def raise_if_stopped(self) -> None:
        """Raise Cancelled if another chunk of the cohort failed; jobs call this between their steps."""
        if self._stop.is_set():
            raise Cancelled

    def _run_in_threads(self, pool: ThreadPoolExecutor, job: Job, chunks: list[tuple[int, int]]) -> None:
        """Run the chunks in threads, and raise the first error after all threads have stopped.

        Args:
            pool: The threads.
            job: Computes the clients of a chunk.
            chunks: The clients from start to stop (exclusive) of each chunk.
        """
        errors: list[BaseException] = []

        def run(start: int, stop: int) -> None:
            """Compute the clients start to stop - 1.  An error is stored, not raised, and stops the other chunks."""
            try:
                self.raise_if_stopped()
                self._run_within_memory(job, start, stop)
            except Cancelled:
                pass  # another chunk has reported its error
            except BaseException as error:
                errors.append(error)
                self._stop.set()

        futures: list[Future[None]] = []
        try:
            for start, stop in chunks:
                futures.append(pool.submit(run, start, stop))
            wait(futures)
        except BaseException:  # an interrupt, or no thread could be started
            self._stop.set()
            wait(futures)
            raise
        if errors:
            raise errors[0]

    @torch.no_grad()
    def _run_within_memory(self, job: Job, start: int, stop: int) -> None:
        """Run a chunk.  If memory is exhausted, run its halves one after the other, and use smaller chunks from now on.

        Args:
            job: Computes the clients of a chunk.
            start: First client of the chunk.
            stop: Client after the last one.

        Raises:
            RunError: A single client does not fit in memory.
        """
        try:
            return job(start, stop)
        except (torch.OutOfMemoryError, MemoryError):
            if stop - start == 1:
                raise RunError(
                    "the memory is exhausted although only one client is computed at a time: lower local.batch_size or "
                    "eval.batch_size, or choose a smaller model or hardware.device=cpu"
                ) from None
            half = (stop - start + 1) // 2
        # from here on, the exception and its references to tensors of the chunk no longer exist
        self.chunk = min(self.chunk or half, half)
        log.warning("out of memory with %d clients at once: the run goes on with %d at a time", stop - start, half)
        self.gradients.free_memory()  # of recorded CUDA graphs
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for first in range(start, stop, half):
            self._run_within_memory(job, first, min(first + half, stop))

    def close(self) -> None:
        """Stop the threads of the pool without waiting for running chunks; nothing if the plan has no threads."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict:
        """Return the fields of the plan by name, with the current chunk size, for `Plan.from_state` when resuming."""
        return asdict(self.plan) | {"chunk": self.chunk}
