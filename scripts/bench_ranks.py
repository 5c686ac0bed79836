"""Time, memory and exchanged bytes of rounds that several CPU processes share.

Each line is a run of its own under torchrun: 1, 2 or 4 processes with one thread each, on gloo.  A rank writes what it
measured to a file.  The time of processes that share cores says nothing about scaling; memory and bytes do.

Letters: N clients, K clients of a round, P length of a row, R ranks.
"""

from __future__ import annotations

import csv
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_clock import row
from bench_work import Workload, split_of

from fedbench.app.compose import compose
from fedbench.core.split import Ragged
from fedbench.data.base import Arrays
from fedbench.engine import ranks
from fedbench.engine.cohort import Cohort
from fedbench.engine.ranks import Ranks
from fedbench.simulation import build
from fedbench.simulation.environment import peak_memory

PROCESSES = (1, 2, 4)
MB = 2**20
COMMON = ["hardware=ddp", "hardware.device=cpu", "hardware.threads=1", "tracking=disabled", "local.epochs=1"]


@dataclass(frozen=True)
class Setting:
    """A workload with a method.

    Attributes:
        overrides: Its options.
        work: Returns the workload, given the number of rounds.
        trainings: How many rows of a client a round trains, and hence exchanges.
        personal: The column group that the server does not average.  "": it averages all columns.
        in_files: Whether rows are stored in files, whatever the free memory and disk space.  Only written rows take
            space.
    """

    overrides: tuple[str, ...]
    work: Callable[[int], Workload]
    trainings: int = 1
    personal: str = ""
    in_files: bool = False


def own_samples(name: str, clients: int, cohort: int, rounds: int, x: np.ndarray, model: str) -> Workload:
    """Return a workload of clients with samples of their own, as many each, of which two are test samples.

    Args:
        name: The name of the workload.
        clients: The number of clients.
        cohort: The number of clients per round.
        rounds: The number of rounds.
        x: The inputs of all samples.  # [n, ...]
        model: "cnn" or "mlp"; not used by a setting whose overrides choose another model.
    """
    indices = np.arange(len(x)).reshape(clients, -1)
    y = np.random.default_rng(0).permutation(len(x)) % 10
    arrays = Arrays(x, y, np.zeros(len(x), np.int8), 10, mean=(0.5,) * 3, std=(0.5,) * 3)
    train, test = (
        Ragged.from_sizes(part.ravel(), np.full(clients, part.shape[1])) for part in (indices[:, 2:], indices[:, :2])
    )
    schedule = [build.draw_cohort(0, r, clients, cohort).tolist() for r in range(rounds)]
    return Workload(name, arrays, split_of(train, test), schedule, {"batch_size": 10, "epochs": 1, "lr": 0.05}, model)


def cnn(rounds: int) -> Workload:
    x = np.random.default_rng(0).integers(0, 256, (6000, 3, 32, 32), dtype=np.uint8)
    return own_samples("cnn", 25, 6, rounds, x, "cnn")


def many(rounds: int) -> Workload:
    x = np.random.default_rng(0).standard_normal((220_000, 64), np.float32)
    return own_samples("many10000", 10_000, 100, rounds, x, "mlp")


def resnet18(rounds: int) -> Workload:
    x = np.random.default_rng(0).integers(0, 256, (12_000, 3, 32, 32), dtype=np.uint8)
    return own_samples("resnet18", 1000, 4, rounds, x, "cnn")


SETTINGS = {
    "cnn": Setting(("algorithm=fedavg", "model=fedavg_cnn", "optimizer.lr=0.005", "hardware.executor=loop"), cnn),
    "many10000": Setting(
        ("algorithm=fedper", "model=mlp", "optimizer.lr=0.05", "hardware.executor=vmap"), many, personal="head"
    ),
    # rounds=250, of which few are run: the store has room for all 1,000 clients
    "resnet18": Setting(
        ("algorithm=ditto", "model=resnet18", "optimizer.lr=0.05", "hardware.executor=loop", "rounds=250"),
        resnet18,
        trainings=2,
        in_files=True,
    ),
}


@dataclass(frozen=True)
class Line:
    """A setting on a number of processes, with further options such as hardware.rows=sharded."""

    setting: str
    processes: int
    rounds: int
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((f"{self.setting:9s}", f"{self.processes} processes", *self.options))


# -- one rank ------------------------------------------------------------------------------------------------
def forget_peak() -> None:
    """Let the peak memory of this process begin anew.  Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(line: Line) -> dict[str, Any]:
    """Run the rounds of a line on this rank, and return its measurements: a value per round, or one for the run.

    Sizes of rows are those of the rows that were written ("rows_mb"), and of all rows ("planned_rows_mb").
    """
    libraries = peak_memory(torch.device("cpu"))  # before anything is made
    setting, group = SETTINGS[line.setting], ranks.current()
    work = setting.work(line.rounds)
    shape = [f"partition.num_clients={work.clients}", f"clients_per_round={work.cohort}"]
    cfg = compose([*COMMON, *shape, *setting.overrides, *line.options])
    method = build.algorithm(cfg)
    engine = build.engine(cfg, work.arrays, work.split, method=method)
    if setting.in_files:  # no bytes are left for rows elsewhere
        engine.rows.left = {"device": 0, "host": 0, "disk": sys.maxsize}
    method.setup(engine.federation, engine.model, engine.rows)
    work.arrays = None  # type: ignore[assignment]  # the engine has copies, and the memory of these is freed
    if setting.personal:
        averaged = engine.model.without(setting.personal).size
    else:
        averaged = engine.model.size
    built_memory = peak_memory(torch.device("cpu"))  # with the samples of all clients, which each rank generates
    forget_peak()
    seconds, samples, received = [], [], []
    for r, ids in enumerate(work.schedule[: line.rounds]):
        group.synchronize("beginning of a round")
        before, began = group.received_bytes, time.perf_counter()
        cohort = Cohort(engine, np.array(sorted(ids)), r)
        method.round(cohort)
        seconds.append(time.perf_counter() - began)
        samples.append(cohort.cost.samples)
        received.append(group.received_bytes - before)
    states = engine.rows.all.values()
    return {
        "images_per_s": [n / s for n, s in zip(samples, seconds)],
        "received_bytes": received,
        "cohort": work.cohort,
        "numbers": engine.model.size,
        "averaged": averaged,
        "rows_mb": sum(rows.used * rows.row_bytes for rows in states) / MB,
        "planned_rows_mb": sum(rows.num_clients * rows.row_bytes for rows in states) / MB,
        "rows_in": sorted({rows.location for rows in states}),
        "data_mb": engine.federation.stored_bytes / MB,
        "libraries_mb": libraries,
        "built_memory_mb": built_memory,
        "peak_memory_mb": peak_memory(torch.device("cpu")),
    }


def worker(argv: Sequence[str]) -> None:
    """Measure a line as one of the processes that torchrun started, and write the result to FOLDER/RANK.json.

    Args:
        argv: One argument, the folder and the fields of the line in JSON.
    """
    folder, fields = json.loads(argv[0])
    group: Ranks = ranks.connect()
    result = measure(Line(**fields))
    (Path(folder) / f"{group.rank}.json").write_text(json.dumps(result))
    ranks.disconnect()


# -- all lines -----------------------------------------------------------------------------------------------
def modelled_bytes(numbers: int, averaged: int, cohort: int, processes: int, trainings: int, is_divided: bool) -> float:
    """Return the bytes that a rank receives in a round according to the model, as a mean over the ranks.

    Each rank receives the trained rows, float32, and the losses of the clients that other ranks trained: a fraction
    (R - 1) / R of the K clients.  With hardware.rows=sharded, it receives these losses, and for the mean two times a
    fraction (R - 1) / R of the averaged columns, as in a ring of processes.

    Args:
        numbers: The length P of a row.
        averaged: The number of columns that the server averages.
        cohort: The number K of clients per round.
        processes: The number R of ranks.
        trainings: How many rows of each client are trained.
        is_divided: Whether hardware.rows=sharded.
    """
    values = trainings * cohort + 2 * averaged if is_divided else trainings * cohort * (numbers + 1)
    return 4 * values * (processes - 1) / processes


def measured(line: Line) -> list[dict[str, Any]]:
    """Run a line under torchrun, and return what each rank measured.

    Raises:
        RuntimeError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        message = json.dumps([folder, vars(line)])
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={line.processes}", __file__, message]
        done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{line} failed: {done.stderr.strip()}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(line.processes)]


def variants(
    settings: Sequence[str], processes: Sequence[int], rounds: int, options: Sequence[Sequence[str]]
) -> Iterator[Line]:
    """Yield a line for each setting and number of processes, and with several processes also for each of `options`.

    Args:
        settings: Keys of SETTINGS.
        processes: The numbers of processes.
        rounds: The number of rounds.
        options: Lists of overrides such as hardware.rows=sharded.
    """
    for name in settings:
        for count in processes:
            yield Line(name, count, rounds)
            for words in options if count > 1 else ():
                yield Line(name, count, rounds, tuple(words))


def table(lines: Iterator[Line]) -> list[dict[str, Any]]:
    """Print every line as it is measured, and return its row.

    Images/s are those of rank 0, without the first round; memory and bytes are of the rank with the most.
    """
    print(
        "\nimages/s, median (min to max); of the rank with the most, MB: peak memory of the rounds, of building the "
        "run, and of the libraries; stored rows, samples;\n"
        "MB that a rank receives in a round, mean over ranks and rounds: measured, modelled"
    )
    out, base_rates = [], {}  # the images/s of the first line of each setting, to which ratios are computed
    for line in lines:
        by_rank = measured(line)
        most = {key: max(rank[key] for rank in by_rank) for key in by_rank[0] if key.endswith("_mb")}
        rates = by_rank[0]["images_per_s"][1:]
        base = base_rates.setdefault(line.setting, statistics.median(rates))
        received = statistics.mean(statistics.mean(rank["received_bytes"]) for rank in by_rank)
        numbers, cohort, averaged = (by_rank[0][key] for key in ("numbers", "cohort", "averaged"))
        trainings, is_divided = SETTINGS[line.setting].trainings, "hardware.rows=sharded" in line.options
        modelled = modelled_bytes(numbers, averaged, cohort, line.processes, trainings, is_divided)
        out.append(
            row(
                line.setting,
                " ".join((str(line.processes), *line.options)),
                [rate / base for rate in rates],
                processes=line.processes,
                options=list(line.options),
                images_per_s=statistics.median(rates),
                received_mb=received / MB,
                modelled_mb=modelled / MB,
                numbers=numbers,
                averaged=averaged,
                cohort=cohort,
                rows_in=by_rank[0]["rows_in"],
                **most,
            )
        )
        print(
            f"  {line!s:60s} {out[-1]['images_per_s']:9,.0f} ({min(rates):,.0f} to {max(rates):,.0f})   "
            f"{most['peak_memory_mb']:,.0f} {most['built_memory_mb']:,.0f} {most['libraries_mb']:,.0f}   "
            f"{most['rows_mb']:,.2f} of "
            f"{most['planned_rows_mb']:,.0f} ({', '.join(out[-1]['rows_in'])})  {most['data_mb']:,.2f}   "
            f"{received / MB:,.3f}  {modelled / MB:,.3f}",
            flush=True,
        )
    return out


def write_runs(path: Path, rows: Sequence[dict[str, Any]], environment: dict[str, Any]) -> None:
    """Write the lines of `as_runs` to a CSV file.

    Args:
        path: The file.
        rows: The result of `table`.
        environment: The result of `describe_environment`.
    """
    lines = as_runs(rows, environment)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def as_runs(rows: Sequence[dict[str, Any]], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return lines of runs.csv for a page of results (docs/pages.md).

    Args:
        rows: The result of `table`.
        environment: The result of `describe_environment`.
    """
    machine, versions = environment["machine"], environment["versions"]
    software = f"Python {versions['python']}, torch {versions['torch']}"
    computer = f"{machine['processor']}, {machine['cores']} cores; {software}"
    memory = ("peak_memory_mb", "built_memory_mb", "libraries_mb")
    columns = ("images_per_s", *memory, "rows_mb", "planned_rows_mb", "data_mb", "received_mb")
    return [
        {
            "part": "main",
            "run": f"{row['workload']} {row['rival']}",
            "method": row["workload"],
            "processes": row["processes"],
            "divided": " ".join(option.removeprefix("hardware.") for option in row["options"]) or "nothing",
            "seed": 0,
            "n": 1,
            "status": "finished",
            "form": "full",
            "commit": environment["commit"][:12],
            "machine": computer,
            **{name: row[name] for name in (*columns, "modelled_mb", "numbers", "averaged", "cohort")},
        }
        for row in rows
    ]


if __name__ == "__main__":
    worker(sys.argv[1:])
