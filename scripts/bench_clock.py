"""Time and memory of rivals that take turns: one clock, one meter of memory, one kind of row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from fedbench.simulation import build

T = TypeVar("T")
PROMISED = ("workload", "rival", "ratio", "min", "max", "n")  # of every row that is written


class Clock:
    """Seconds of some work on a device.

    On a GPU between two events in its queue, awaited once, when all the work has been queued: what the host computes
    while the GPU is busy costs nothing, what it keeps the GPU waiting for does.  Elsewhere wall time; with
    processor=True the processor time of all threads of this process, which other processes do not lengthen.
    """

    def __init__(self, device: torch.device, processor: bool = False):
        self.device, self.now = device, time.process_time if processor else time.perf_counter

    def __call__(self, work: Callable[[], T]) -> tuple[T, float]:
        """What the work returns, and its seconds."""
        if self.device.type == "cuda":
            return self._between_events(work)
        began = self.now()
        found = work()
        return found, self.now() - began

    def _between_events(self, work: Callable[[], T]) -> tuple[T, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        found = work()
        end.record()
        end.synchronize()
        return found, begin.elapsed_time(end) / 1e3


class Meter:
    """The most GPU memory that one rival ever had: what it holds, and what its work takes on top.

    Rivals live beside each other, so the peak is reset before each piece of work, and what the others hold is taken
    off.  On a CPU there is no such account: peak_mb is None.
    """

    def __init__(self, device: torch.device):
        self.device, self.counts = device, device.type == "cuda"
        self.held = self.peak = 0

    def __call__(self, work: Callable[[], T]) -> T:
        if not self.counts:
            return work()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        found = work()
        self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated(self.device) - before)
        self.held += torch.cuda.memory_allocated(self.device) - before
        return found

    @property
    def peak_mb(self) -> float | None:
        return self.peak / 2**20 if self.counts else None


class Rival(Protocol):
    """Something that trains: `round` returns how many images it trained on.  precision: of its products."""

    precision: str

    def round(self, round: int) -> int: ...


class Turns:
    """Rivals that take turns, so that a ratio compares neighbours in time.  rates: images/s of each timed round."""

    def __init__(self, makers: Mapping[str, Callable[[], Rival]], device: torch.device):
        """makers: how each is made, so that what it holds from the start is counted as its own."""
        self.device, self.clock = device, Clock(device)
        self.meters = {name: Meter(device) for name in makers}
        self.rivals = {name: self.meters[name](make) for name, make in makers.items()}
        self.rates: dict[str, list[float]] = {name: [] for name in makers}

    def play(self, rounds: int, warmup: int = 1) -> Turns:
        """Let the rivals take turns, and return this object with their images/s in `rates`.

        Args:
            rounds: The number of rounds of each rival.
            warmup: The number of first rounds that are not timed, in which memory is touched and graphs are captured.
        """
        for r in range(rounds):
            for name in self.rivals:
                rate = self._turn(name, r)
                if r >= warmup:
                    self.rates[name].append(rate)
        build.set_precision("float32")
        return self

    def _turn(self, name: str, round: int) -> float:
        rival, meter = self.rivals[name], self.meters[name]
        torch.set_num_threads(1)
        build.set_precision(rival.precision)
        seen, seconds = self.clock(lambda: meter(lambda: rival.round(round)))
        return seen / seconds

    def rows(self, workload: str, base: str) -> list[dict[str, Any]]:
        """Return a row for each rival: its images/s as a ratio to those of another rival in the same round.

        Args:
            workload: The name of the workload.
            base: The name of the other rival.
        """
        return [
            row(
                workload,
                name,
                [a / b for a, b in zip(rates, self.rates[base])],
                base=base,
                images_per_s=statistics.median(rates),
                peak_memory_mb=self.meters[name].peak_mb,
                precision=self.rivals[name].precision,
            )
            for name, rates in self.rates.items()
        ]


def row(workload: str, rival: str, ratios: list[float], **more: Any) -> dict[str, Any]:
    """Return a row of results: median, smallest and largest ratio, and further columns.

    Args:
        workload: The name of the workload.
        rival: The name of the rival.
        ratios: Its ratios, one for each round.
        **more: Further columns.
    """
    return {
        "workload": workload,
        "rival": rival,
        "ratio": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "n": len(ratios),
        **more,
    }
