"""``python -m fedbench -m ... --dry-run``: what a sweep would do with each run, and how long it would take."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedbench.core.files import read_json
from fedbench.core.lock import holder, is_held
from fedbench.core.settings import load_config
from fedbench.simulation.run_folder import is_resumable
from fedbench.simulation.simulate import is_same_run
from fedbench.simulation.summary_text import duration

BEGIN, RESUME, FINISHED, ELSEWHERE = "to begin", "to resume", "finished", "in another process"


class Planned(NamedTuple):
    """What a sweep would do with a run.

    Attributes:
        name: The folder of the run, relative to that of the sweep.
        method: The value of algorithm=.
        action: "to begin", "to resume", "finished" or "in another process".  Only the first two are computed.
        done: The number of finished rounds.
        rounds: The number of rounds of the whole run.
        round_s: Mean seconds of a finished round, with its evaluation; None if no round is finished.
        note: Another fact about the run for the user, or "".
    """

    name: str
    method: str
    action: str
    done: int
    rounds: int
    round_s: float | None
    note: str = ""


def plan_of(folder: Path, name: str, config: Mapping[str, Any]) -> Planned:
    """Return what a sweep would do with a run: begin, resume or skip it.  Files are only read.

    Args:
        folder: The folder of the run, which need not exist.
        name: The folder relative to that of the sweep.
        config: The checked configuration of the run.

    Returns:
        The action, with the finished (``done``) and requested rounds, and the mean seconds of a round (``round_s``).
    """
    method, rounds = config["choices"]["algorithm"], config["rounds"]
    if not (folder / "config.yaml").is_file():
        return Planned(name, method, BEGIN, done=0, rounds=rounds, round_s=None)
    if not is_same_run(load_config(folder / "config.yaml"), config):
        note = "the folder has a run with other options, whose files would be moved to a new folder"
        return Planned(name, method, BEGIN, done=0, rounds=rounds, round_s=None, note=note)
    done, round_s = _finished_rounds(folder)
    if is_held(folder):  # by another process, which holder() describes
        return Planned(name, method, ELSEWHERE, done, rounds, round_s, note=holder(folder))
    if read_json(folder / "summary.json").get("status") == "finished":
        return Planned(name, method, FINISHED, done, rounds, round_s)
    note = str(read_json(folder / "status.json").get("sentence") or "")
    if not is_resumable(folder):  # it ended before its first checkpoint
        return Planned(name, method, BEGIN, done=0, rounds=rounds, round_s=round_s, note=note)
    return Planned(name, method, RESUME, done, rounds, round_s, note)


def _finished_rounds(folder: Path) -> tuple[int, float | None]:
    """Return (last round in a run's costs.csv, mean seconds of a round); (0, None) without a round or the file."""
    last, seconds = 0, []
    with suppress(OSError), (folder / "costs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            with suppress(KeyError, TypeError, ValueError):  # the last line may be incomplete
                last = int(row["round"])
                seconds.append(float(row["train_s"]) + float(row["eval_s"] or 0))  # empty: not evaluated
    return last, statistics.fmean(seconds) if seconds else None


def show_plan(planned: Sequence[Planned]) -> None:
    """Print a table of the runs of a sweep, and the estimated time of those that it would compute.

    The time of a round is the mean over the run's finished rounds.  For a run without any, it is the mean over runs of
    the same method, or else over all runs.

    Args:
        planned: What the sweep would do with each of its runs.
    """
    from rich.console import Console
    from rich.table import Table

    estimates = [_seconds_left(run, planned) for run in planned]
    table = Table(box=None, pad_edge=False)
    for title in ("run", "action", "rounds", "time left", ""):
        table.add_column(title, overflow="fold")
    for run, seconds in zip(planned, estimates):
        time_left = "unknown" if seconds is None else duration(seconds)
        table.add_row(run.name, run.action, f"{run.done} of {run.rounds}", time_left, run.note)
    console = Console(markup=False, highlight=False, width=240)  # wide, so that few lines are folded
    console.print(table)
    actions = list(dict.fromkeys(run.action for run in planned))
    counts = ", ".join(f"{sum(run.action == action for run in planned)} {action}" for action in actions)
    times = [seconds for seconds in estimates if seconds is not None]
    unknown = len(estimates) - len(times)
    print(f"\n{len(planned)} runs: {counts}")
    if times:
        print(f"estimated time left, one run after another: {duration(sum(times))}", end="")
        print(f", without {unknown} runs of unknown duration" if unknown else "", flush=True)
    else:
        print("time left: unknown, because no run of the sweep has finished a round", flush=True)


def _seconds_left(run: Planned, planned: Sequence[Planned]) -> float | None:
    """Return the estimated seconds that a sweep computes for a run; None if no run has finished a round yet.

    Args:
        run: The run.
        planned: All runs of the sweep.
    """
    if run.action in (FINISHED, ELSEWHERE):  # skipped: it is finished, or runs in another process
        return 0.0
    of_method = [other.round_s for other in planned if other.method == run.method]
    # the seconds of a round: of this run, else of the runs of its method, else of all runs
    for round_times in ([run.round_s], of_method, [other.round_s for other in planned]):
        measured = [seconds for seconds in round_times if seconds is not None]
        if measured:
            return (run.rounds - run.done) * statistics.fmean(measured)
    return None
