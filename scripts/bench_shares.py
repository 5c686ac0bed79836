"""Where the time of a whole run goes: start-up, training, evaluation, tracking and checkpoints, the end.

A run of the command line interface, from the start of its process to its end.  Its partition is on disk when all is
built and round 1 begins, its last summary when the last round is over; the times of these files divide the run.
Training and evaluation are what its own costs.csv says, and what is left of the rounds is tracking and checkpoints.  At
the end W&B's record is written, where it is kept, and Python stops.  A second run, of one round, says what a user waits
for before anything is learned: its time less its round.
"""

from __future__ import annotations

import csv
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_clock import row

SETTINGS = {
    "mlp": ["dataset=digits", "partition.num_clients=20", "sample_rate=1", "local.epochs=5", "algorithm=fedavg"],
    "many": [
        "dataset=synthetic",
        "dataset.n=27000",
        "dataset.shape=[64]",
        "dataset.num_classes=10",
        "partition=iid",
        "partition.num_clients=1000",
        "clients_per_round=100",
        "local.epochs=1",
        "algorithm=fedavg",
    ],
    "cnn": [
        "dataset=generated",
        "dataset.n=19000",
        "partition=iid",
        "partition.num_clients=25",
        "clients_per_round=6",
        "model=fedavg_cnn",
        "optimizer.lr=0.005",
        "local.epochs=1",
        "algorithm=fedavg",
    ],
}


@dataclass(frozen=True)
class Run:
    """The seconds of a run.

    Attributes:
        before: From the start of the process to round 1.
        rounds: All rounds.
        after: From the last round to the end of the process.
        train: Training in each round.
        evaluation: Evaluation in each round.
        processor: Processor time of the whole run.
    """

    before: float
    rounds: float
    after: float
    train: list[float]
    evaluation: list[float]
    processor: float = 0.0

    @property
    def whole(self) -> float:
        return self.before + self.rounds + self.after

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the run, which sum to the whole."""
        train, evaluation = sum(self.train), sum(self.evaluation)
        return {
            "start-up": self.before,
            "training": train,
            "evaluation": evaluation,
            "tracking and checkpoints": self.rounds - train - evaluation,
            "the end": self.after,
        }


def played(overrides: Sequence[str]) -> Run:
    """Run the command line interface in a temporary folder, and return the times of the run.

    Raises:
        RuntimeError: The command failed; with its messages.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, spent = Path(name) / "run", used()
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "fedbench", *overrides, "hardware=cpu", f"hydra.run.dir={folder}"],
            check=False,
            capture_output=True,
            text=True,
            cwd=name,
        )
        ended = time.time()
        if done.returncode:
            raise RuntimeError(f"python -m fedbench {' '.join(overrides)} failed: {done.stderr.strip()}")
        built, over = ((folder / file).stat().st_mtime for file in ("partition.json", "summary.json"))
        with (folder / "costs.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    return Run(
        before=built - began,
        rounds=over - built,
        after=ended - over,
        train=[float(r["train_s"]) for r in rows],
        evaluation=[float(r["eval_s"]) for r in rows],
        processor=used() - spent,
    )


def used() -> float:
    """Return the processor seconds of all processes that this one started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def shares(settings: Sequence[str], name: str, rounds: int, tracking: str) -> list[dict[str, Any]]:
    """Run a setting, print how its time is divided, and return a row for each part.

    The ratio of a row is the part's fraction of the time that its column "of" names, such as the whole run.

    Args:
        settings: The overrides of the run.
        name: The name of the setting.
        rounds: The number of rounds.  A run of one round is measured too.
        tracking: The option of the group tracking.
    """
    overrides = [*settings, f"tracking={tracking}"]
    one, run = played([*overrides, "rounds=1"]), played([*overrides, f"rounds={rounds}"])
    out = rows(f"shares: {name}, {rounds} rounds, tracking={tracking}", one, run)
    print(f"\n{out[0]['workload']}: {run.whole:.2f} s, {run.processor:.2f} of the processor")
    for r in out:
        several = f" ({r['min']:.1%} to {r['max']:.1%}), n={r['n']}" if r["n"] > 1 else ""
        print(f"  {r['rival']:36s} {r['seconds']:7.2f} s   {r['ratio']:6.1%} of {r['of']}{several}")
    print(f"  the run of one round took {one.whole:.2f} s, {one.processor:.2f} of the processor", flush=True)
    return out


def rows(title: str, one: Run, run: Run) -> list[dict[str, Any]]:
    """Return the rows of a setting: the fraction of the time in each part of a run.

    Args:
        title: The name of the workload in the rows.
        one: A run of one round, which shows the time without training.
        run: A run of all rounds.
    """
    train, evaluation = sum(run.train), sum(run.evaluation)
    start = one.whole - one.train[0] - one.evaluation[0]
    each = [e / (t + e) for t, e in zip(run.train, run.evaluation)]  # the fraction of evaluation in each round
    return [
        *(
            row(title, part, [seconds / run.whole], seconds=seconds, of="the run")
            for part, seconds in run.parts.items()
        ),
        row(title, "evaluation, round by round", each, seconds=evaluation, of="training and evaluation"),
        row(title, "all but training", [1 - train / run.rounds], seconds=run.rounds - train, of="the rounds"),
        row(title, "a run of one round, less the round", [start / one.whole], seconds=start, of="that run"),
    ]
