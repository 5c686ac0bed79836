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
    """A clock that measures the seconds of a function on a device.

    On a GPU, the time is that between two events in its queue.  The host waits once, after it has queued all work.
    Host computations count only while the GPU waits for them.  On a CPU, it is wall time, or processor time.

    Args:
        device: The device.
        processor: Whether to measure the processor time of all threads of this process, which other processes do not
            lengthen, instead of wall time.
    """

    def __init__(self, device: torch.device, processor: bool = False):
        self.device, self.now = device, time.process_time if processor else time.perf_counter

    def __call__(self, work: Callable[[], T]) -> tuple[T, float]:
        """Call a function, and return its result and the seconds that it took."""
        if self.device.type == "cuda":
            return self._between_events(work)
        began = self.now()
        result = work()
        return result, self.now() - began

    def _between_events(self, work: Callable[[], T]) -> tuple[T, float]:
        """Call a function, and return its result and its seconds on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1e3  # milliseconds


class Meter:
    """The peak GPU memory of one rival: its tensors between calls (``held``), and those of a call in addition.

    Rivals share a process, so the peak is reset before each call, and the memory of the others is subtracted.  On a
    CPU, memory is not measured, and peak_mb is None.
    """

    def __init__(self, device: torch.device):
        self.device, self.counts = device, device.type == "cuda"
        self.held = self.peak = 0

    def __call__(self, work: Callable[[], T]) -> T:
        if not self.counts:
            return work()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = work()
        self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated(self.device) - before)
        self.held += torch.cuda.memory_allocated(self.device) - before
        return result

    @property
    def peak_mb(self) -> float | None:
        return self.peak / 2**20 if self.counts else None


class Rival(Protocol):
    """An implementation to measure: `round` trains and returns its number of images; precision is float32 or tf32."""

    precision: str

    def round(self, round: int) -> int: ...


class Turns:
    """Rivals that take turns, so that a ratio compares neighbours in time.

    Args:
        makers: Functions that make the rivals, by name.  The memory that such a function takes counts as the rival's.
        device: The device.

    Attributes:
        rates: The images/s of each timed round, by the name of the rival.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Rival]], device: torch.device):
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
        """Run a round of the rival with this name, and return its images/s."""
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
