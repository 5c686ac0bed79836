"""How the time and the peak memory of a round grow: with N, with the cohort, and with the model.

On a CPU every line is measured in a process of its own, whose peak memory is then the line's, and its milliseconds are
of processor time, which other processes do not lengthen.  On a GPU the lines follow each other.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from bench_clock import Clock, Meter, row
from bench_work import Ours, crowd

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.pgfed import PGFed
from fedbench.simulation.environment import peak_memory

METHODS = {"fedavg": FedAvg, "fedper": FedPer, "pgfed": PGFed}
WARMUP = 2  # PGFed's first round is FedAvg's
FEW, MANY = 25, 400  # clients of the curves other than N's
WIDTHS = {"mlp": (64, 256, 1024, 4096), "cnn": (128, 512, 2048)}


@dataclass(frozen=True)
class Line:
    """A run to measure, one point of a curve.  Each client has 20 samples.

    Attributes:
        curve: What grows along the curve: "clients", "cohort" or "model".
        method: A key of METHODS.
        clients: The number of clients.
        cohort: The number of clients per round.
        model: "mlp" or "cnn".
        width: The width of the model's last hidden layer; None for the model's own.
        executor: A value of hardware.executor.
        rounds: The number of rounds.
        momentum: The momentum of local SGD.
    """

    curve: str
    method: str
    clients: int
    cohort: int
    model: str = "mlp"
    width: int | None = None
    executor: str = "vmap"
    rounds: int = 32
    momentum: float = 0.0

    def __str__(self) -> str:
        model = self.model + (f" of width {self.width}" if self.width else "")
        return f"{self.method:7s} N={self.clients:>9,}  {self.cohort:>3} a round  {model}"


def over_clients(counts: Sequence[int], rounds: int = 32) -> Iterator[Line]:
    """Yield lines with more and more clients (``counts``), of which 100 take part in a round."""
    for method in ("fedavg", "fedper"):
        yield from (Line("clients", method, n, min(100, n), rounds=rounds) for n in counts)


def over_cohorts(
    counts: Sequence[int], methods: Sequence[str] = ("fedavg",), models: Sequence[str] = ("mlp", "cnn"), rounds: int = 8
) -> Iterator[Line]:
    """Yield lines in which more and more of the same clients take part in a round.

    Args:
        counts: The numbers of clients per round.
        methods: Keys of METHODS.
        models: The models, "mlp" or "cnn".
        rounds: The number of rounds of each line.
    """
    for model in models:
        for method in methods:
            yield from (
                Line("cohort", method, max(MANY, *counts), k, model, executor="auto", rounds=rounds, momentum=0.9)
                for k in counts
            )


def over_models(widths: dict[str, Sequence[int]], rounds: int = 8) -> Iterator[Line]:
    """Yield lines with wider and wider models.

    Args:
        widths: The widths of the last hidden layer, by model: "mlp" and "cnn".
        rounds: The number of rounds of each line.
    """
    for model, cohort in (("mlp", FEW), ("cnn", 6)):
        yield from (
            Line("model", "fedavg", FEW, cohort, model, width, executor="auto", rounds=rounds, momentum=0.9)
            for width in widths[model]
        )


def measured(line: Line, device: torch.device) -> dict[str, Any]:
    """Return the times of the rounds of a line in ms, its peak memory, and facts about its model and states.

    Returns:
        "times" of the rounds after the warm-up; "plan", the executor plan; "numbers", the length P of a row;
        "state_mb", the size of all written rows of clients; "libraries_mb", the memory of the process before it made
        anything (0 on a GPU); and "peak_memory_mb".
    """
    torch.set_num_threads(1)
    libraries = peak_memory(torch.device("cpu"))
    work = crowd(line.clients, line.cohort, line.rounds, line.model, line.width).doing(momentum=line.momentum)
    meter, clock = Meter(device), Clock(device, processor=True)
    rival = meter(lambda: Ours(work, work.plans(line.executor, device), device, METHODS[line.method]()))
    times = [1e3 * clock(partial(meter, partial(rival.round, r)))[1] for r in range(line.rounds)]
    rows = rival.engine.rows.all.values()
    return {
        "times": times[min(WARMUP, line.rounds - 1) :],
        "plan": rival.plan.short_name,
        "numbers": rival.engine.model.size,
        "state_mb": sum(r.used * r.row_bytes for r in rows) / 2**20,
        "libraries_mb": libraries if meter.peak_mb is None else 0.0,
        "peak_memory_mb": peak_memory(torch.device("cpu")) if meter.peak_mb is None else meter.peak_mb,
    }


def apart(line: Line, device: torch.device) -> dict[str, Any]:
    """Return the measurements of a line: on a CPU in a new process, on a GPU in this one after freeing its memory."""
    if device.type == "cpu":
        with multiprocessing.get_context("spawn").Pool(1) as process:
            return process.apply(measured, (line, device))
    gc.collect()
    torch.cuda.empty_cache()
    return measured(line, device)


def curves(lines: Iterator[Line], device: torch.device, most: int | None = None) -> list[dict[str, Any]]:
    """Measure and print lines, and return a row for each: ms per round as a ratio to the first line of its curve.

    Args:
        lines: The lines.  Those of one curve differ in one number, such as that of the clients.
        device: The device.
        most: The largest number of rounds of a line; None for no limit.
    """
    print(
        "\nms a round, evaluation apart, median (min to max); ratio to the first line of its curve; peak memory "
        "(of it what libraries took); rows of clients"
    )
    out, first = [], {}
    for line in lines:
        line = replace(line, rounds=min(line.rounds, most or line.rounds))
        found = apart(line, device)
        times = found.pop("times")
        base = first.setdefault((line.curve, line.method, line.model), statistics.median(times))
        out.append(
            row(
                f"growth: {line.curve}",
                line.method,
                [t / base for t in times],
                ms=statistics.median(times),
                clients=line.clients,
                cohort=line.cohort,
                model=line.model,
                width=line.width,
                **found,
            )
        )
        print(
            f"  {line!s:58s} {out[-1]['ms']:8.2f} ({min(times):.2f} to {max(times):.2f}) ms  "
            f"x {out[-1]['ratio']:.2f}   {found['peak_memory_mb']:,.0f} ({found['libraries_mb']:,.0f}) MB   "
            f"{found['state_mb']:.2f} MB of {found['numbers']:,} numbers each   {found['plan']}",
            flush=True,
        )
    return out
