"""A sweep: its cells are checked first, then Hydra's launcher runs them, and a table tells how they ended."""

from __future__ import annotations

import math
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from fedbench.app import jobs
from fedbench.app.compose import Composer, explain, quoted
from fedbench.app.hydra_run import Outcome, check_processes, compose_checked, folder_key, make_folder, run_hydra
from fedbench.core import caller
from fedbench.core.files import read_json
from fedbench.core.lock import holder, is_held
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import WHEREABOUTS, is_matched
from fedbench.simulation.progress import clients_of, primary_of

MOST_CELLS = 64  # more than that are checked one swept value at a time ...
ENDS = 8  # ... and of a long list of values these many at either end: cells check themselves again
SECONDS_AT_FIRST, SECONDS_BETWEEN = 1.0, 5.0  # before the first progress line of long checks, and between lines
Item = TypeVar("Item")
DONE = ("finished", "finished already")
SCORES = {  # columns of the final table
    "last": "mean personalized score on the test parts, at the last round",
    "best by val": "the same at the round of the best validation score",
    "val": "that validation score",
    "clients": "over how many clients the last mean is, where these are not all",
}
ABSENT = {"status": "not started", "score": None, "sentence": ""}


def sweep(composer: Composer, flags: list[str], overrides: list[str]) -> Outcome:
    """Run the cells of a sweep.

    flags: Hydra's, as typed.  Raises ConfigError where the command is wrong: then nothing has begun.
    """
    master = composer.compose(overrides, multirun=True)
    is_basic = str(master.hydra.launcher._target_).endswith("BasicLauncher")
    require(
        is_basic or not jobs.under_torchrun(),
        "under torchrun the cells of a sweep run one by one, each in all processes: leave hydra/launcher out",
    )
    naming = _naming(master, composer.swept(_with_params(master, overrides)))
    planned = plan(composer, master, overrides, naming)
    folder = make_folder(Path(folder_key(master, "hydra.sweep.dir")), fresh=False)
    token = uuid.uuid4().hex
    extra = [*naming, f"hydra.sweep.dir={quoted(folder)}", f"+hydra.job.env_set.{jobs.TOKEN}={token}"]
    extra.append(f"+hydra.job.env_set.{jobs.TOTAL}={len(planned) or ''}")
    if jobs.is_basic(master.hydra.sweeper) and not any(text.startswith("hydra/sweeper=") for text in overrides):
        extra += ["hydra/sweeper=planned", f"hydra.sweeper.checked={bool(planned)}"]
    interrupted, stopped = False, None
    try:
        run_hydra(flags, [*composer.rewrite(overrides), *extra])
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:  # the launcher's: the cells' own failures are in their status files
        stopped = error
    rows = outcomes(folder, token, planned)
    if stopped is not None:
        if isinstance(stopped, ConfigError) and all(row["status"] == ABSENT["status"] for row in rows):
            raise stopped  # a mistake in the command: nothing began
        jobs.say(f"the sweep stopped: {explain(stopped)}")
    show_table(rows, folder)
    report = caller.suggested(f"python -m fedbench report {shlex.quote(str(folder))}")
    print(f"tables with mean and spread over seeds: {report}", flush=True)
    failed = not rows or any(row["status"] not in DONE for row in rows)
    status = jobs.INTERRUPTED if interrupted else jobs.FAILED if failed else jobs.OK
    return Outcome(status, tuple(folder / row["cell"] for row in rows))


def _with_params(master: DictConfig, overrides: list[str]) -> list[str]:
    params = master.hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *overrides]


def _naming(master: DictConfig, swept: list[str]) -> list[str]:
    """Return overrides that put the swept keys into the run names, even excluded keys, and keep them in long names."""
    hidden = [key for key in swept if is_matched(key, WHEREABOUTS)]
    left = [pattern for pattern in WHEREABOUTS if not any(is_matched(key, [pattern]) for key in hidden)]
    naming = [f"hydra.job.config.override_dirname.exclude_keys={_listed(left)}"] if hidden else []
    sweep: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    subdir = str(sweep["subdir"])
    if subdir.startswith("${cell_name:") and subdir.endswith("}"):  # the default, not a value of the user
        naming.append(f'hydra.sweep.subdir="{subdir[:-1]},${{hydra.sweep.dir}},{_listed(swept)}}}"')
    return naming


def _listed(names: list[str]) -> str:
    return f"[{','.join(map(repr, names))}]"


def plan(composer: Composer, master: DictConfig, overrides: list[str], naming: list[str]) -> list[str]:
    """Check the cells of a sweep before any runs; their folder names ([]: only the sweeper knows)."""
    if not jobs.is_basic(master.hydra.sweeper):
        return []
    runs = composer.cells(_with_params(master, overrides))
    few = len(runs) <= MOST_CELLS
    first = [tuple(run) for run in _each_value(runs)]  # so that a wrong value is found at once
    names = {}
    what = "cells" if few else f"swept values of {len(runs)} cells"
    for run in with_progress(list(dict.fromkeys([*first, *map(tuple, runs)] if few else first)), what):
        full = compose_checked(composer, [*run, *naming])
        check_processes(full, ["-m", *overrides])
        names[run] = folder_key(full, "hydra.sweep.subdir")
    planned = [names[tuple(run)] for run in runs] if few else []
    twice = next((name for name in planned if planned.count(name) > 1), None)
    require(twice is None, f"this sweep has the same cell twice: {twice}")
    return planned


def with_progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items, and print the number of checked items every few seconds."""
    shown = time.monotonic() - SECONDS_BETWEEN + SECONDS_AT_FIRST
    for i, item in enumerate(items):
        if time.monotonic() - shown >= SECONDS_BETWEEN:
            print(f"checking the {what} before the first one starts: {i} of {len(items)} done", flush=True)
            shown = time.monotonic()
        yield item


def _each_value(runs: list[list[str]]) -> list[list[str]]:
    """Every swept value once (of a long list its ends), beside the first of the others."""
    columns = [list(dict.fromkeys(column)) for column in zip(*runs)]
    first = [column[0] for column in columns]
    others = [
        [*first[:i], value, *first[i + 1 :]]
        for i, column in enumerate(columns)
        for value in column[1:]
        if value in (*column[:ENDS], *column[-ENDS:])
    ]
    return [first, *others]


def outcomes(folder: Path, token: str, planned: list[str]) -> list[dict[str, Any]]:
    """How each cell of a sweep ended: what its status.json says, if this command wrote it.

    Returns a row (cell, status, score, sentence) per cell: those planned first, in their order.
    """
    statuses = {}
    for path in sorted(folder.rglob("status.json")):
        status = read_json(path)
        if status.get("token") == token:
            if status["status"] == "running":
                status |= {"status": "died", "sentence": "the process ended without a word"}
            statuses[str(path.parent.relative_to(folder))] = status
    statuses |= {name: _status_elsewhere(folder / name) for name in _visited(folder, token) if name not in statuses}
    planned = [str(Path(name)) for name in planned]  # "" is the sweep's own folder
    names = [*planned, *(name for name in statuses if name not in planned)]
    return [{"cell": name, **statuses.get(name, ABSENT)} for name in names]


def _visited(folder: Path, token: str) -> list[str]:
    """The cells that this command came to."""
    path = jobs.visited_file(folder, token)
    if not path.exists():
        return []
    names = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return list(dict.fromkeys(names))


def _status_elsewhere(cell: Path) -> dict[str, Any]:
    """How a cell stands of which another process has the last word: what that one says, unless it still has it."""
    if is_held(cell):
        return {"status": "with another process", "score": None, "sentence": holder(cell)}
    status = read_json(cell / "status.json") or {"status": "running", "score": None}
    if status["status"] == "running":
        return {**status, "status": "died", "sentence": "the other process ended without a word"}
    return {**status, "status": "finished already" if status["status"] == "finished" else status["status"]}


def show_table(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the status of each run of a sweep, with the scores of finished runs, and the number of runs by status.

    Scores are those of the last round and of the round with the best validation score.  The best round by test score is
    never shown.
    """
    from rich.console import Console
    from rich.table import Table

    scores = [_scores(folder / row["cell"]) if row["status"] in DONE else {} for row in rows]
    shown = [name for name in SCORES if name == "last" or any(name in cell for cell in scores)]
    table = Table(box=None, pad_edge=False)
    for title in ("cell", "status", *shown, ""):
        table.add_column(title, overflow="fold")
    for row, cell in zip(rows, scores, strict=True):
        table.add_row(row["cell"], row["status"], *(cell.get(name, "") for name in shown), row["sentence"])
    width = None if sys.stdout.isatty() else 240  # a file has room: nothing is folded there
    console = Console(markup=False, highlight=False, width=width)
    console.print()
    console.print(table)
    names = list(dict.fromkeys(row["status"] for row in rows))
    tally = ", ".join(f"{sum(row['status'] == name for row in rows)} {name}" for name in names)
    console.print(f"\n{len(rows)} cells: {tally or 'none ran'}")
    lines = [f"{name}: {SCORES[name]}" for name in shown if any(name in cell for cell in scores)]
    print("\n".join(lines), end="\n" if lines else "", flush=True)


def _scores(cell: Path) -> dict[str, str]:
    """Return the scores of a finished run, by column of the table."""
    summary = read_json(cell / "summary.json")
    name = primary_of(summary)
    found = {
        "last": jobs.value_in(summary, "last", f"personal/{name}"),
        "best by val": jobs.value_in(summary, "best_val", f"personal/{name}"),
        "val": jobs.value_in(summary, "best_val", f"val/{name}"),
    }
    shown = {column: f"{value:.4f}" for column, value in found.items() if not math.isnan(value)}
    if shown and (over := clients_of(summary, summary["last"], f"personal/{name}")):
        shown["clients"] = over
    return shown
