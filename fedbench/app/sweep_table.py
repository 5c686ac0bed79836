"""The table of a sweep: status and scores of its runs, printed at its end."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from fedbench.core.files import read_json
from fedbench.core.lock import holder, is_held
from fedbench.simulation.result import primary_of, value_in
from fedbench.simulation.status import STATUS_FILE
from fedbench.simulation.summary_text import clients_of

DONE = ("finished", "finished already", "paused")  # not failures
SCORES = {  # columns of the table, and their meaning
    "last": "mean personalized test score of the last round",
    "best by val": "mean personalized test score of the round with the best validation score",
    "val": "best validation score",
    "clients": "number of clients in the last mean, if some are omitted",
}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return a dict from run to (inode, modification time) of its status file, for all runs in a sweep's folder.

    A run is named by its folder, relative to that of the sweep.  The values change whenever the run writes its status,
    so that `outcomes` sees which runs were started.

    Args:
        folder: The folder of the sweep.
    """
    stats = {str(path.parent.relative_to(folder)): path.stat() for path in folder.rglob(STATUS_FILE)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def outcomes(folder: Path, before: dict[str, tuple[int, int]], planned: list[str]) -> list[dict[str, Any]]:
    """Return the status of each run of a sweep.

    Args:
        folder: The folder of the sweep.
        before: From run to (inode, modification time) of its status file, before the sweep.
        planned: The names of the run folders; [] for all whose status has changed.

    Returns:
        A dict for each run: run (the folder name), status, score, and sentence (why it failed, for example; or "").
    """
    after = stamps(folder)
    changed = [name for name in sorted(after) if after[name] != before.get(name)]
    planned = [str(Path(name)) for name in planned]  # "" (the sweep's folder itself) becomes "."
    names = planned or changed
    return [{"run": name, **_outcome(folder / name, name in changed)} for name in names]


def _outcome(run_folder: Path, changed: bool) -> dict[str, Any]:
    """Return status, score and sentence of a run.

    The status is "in another process" if another command runs the run now, and "finished already" if it was finished
    before the sweep.  It is "not started" for another run without a new status, and "died" if its process was killed.
    In all other cases, it is that of the run's status file.

    Args:
        run_folder: The run folder.
        changed: Whether its status file has changed since the sweep began.
    """
    if is_held(run_folder):
        return {"status": "in another process", "score": None, "sentence": holder(run_folder)}
    status = {"score": None, "sentence": "", **read_json(run_folder / STATUS_FILE)}
    if str(status.get("status")).startswith("finished") and not changed:
        return {**status, "status": "finished already"}
    if not changed:
        return {"status": "not started", "score": None, "sentence": ""}
    if status["status"] == "running":
        return {**status, "status": "died", "sentence": "its process was killed"}
    return status


def show_table(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the status and scores of each run of a sweep, and the number of runs by status.

    Scores are those of the last round and of the round with the best validation score.  The best round by test score is
    never shown.

    Args:
        rows: For each run, a dict with run (its folder), status, score and sentence.
        folder: The folder of the sweep.
    """
    from rich.console import Console
    from rich.table import Table

    scores = [_scores(folder / row["run"]) if row["status"] in DONE else {} for row in rows]
    score_columns = [name for name in SCORES if name == "last" or any(name in run_scores for run_scores in scores)]
    table = Table(box=None, pad_edge=False)
    for title in ("run", "status", *score_columns, ""):
        table.add_column(title, overflow="fold")
    for row, run_scores in zip(rows, scores, strict=True):
        table.add_row(row["run"], row["status"], *(run_scores.get(name, "") for name in score_columns), row["sentence"])
    width = None if sys.stdout.isatty() else 240  # wide lines in a file, so that nothing is folded
    console = Console(markup=False, highlight=False, width=width)
    console.print()
    console.print(table)
    statuses = list(dict.fromkeys(row["status"] for row in rows))
    counts = ", ".join(f"{sum(row['status'] == status for row in rows)} {status}" for status in statuses)
    console.print(f"\n{len(rows)} runs: {counts or 'none started'}")
    lines = [f"{name}: {SCORES[name]}" for name in score_columns if any(name in run_scores for run_scores in scores)]
    print("\n".join(lines), end="\n" if lines else "", flush=True)


def _scores(run_folder: Path) -> dict[str, str]:
    """Return the scores of a run as texts with 4 decimals, for the table of a sweep.

    Args:
        run_folder: The run folder.  Its summary.json has the scores.

    Returns:
        {column: text}: the test score of the last round ("last") and of the round with the best validation score ("best
        by val"), that validation score ("val"), and "clients" if the score is undefined for some, such as "3 of 6".
        Missing values are left out.
    """
    summary = read_json(run_folder / "summary.json")
    name = primary_of(summary)
    value_by_column = {
        "last": value_in(summary, "last", f"personal/{name}"),
        "best by val": value_in(summary, "best_val", f"personal/{name}"),
        "val": value_in(summary, "best_val", f"val/{name}"),
    }
    texts = {column: f"{value:.4f}" for column, value in value_by_column.items() if not math.isnan(value)}
    # the number of clients that the score is a mean over, as text; "" if it is over all clients
    if texts and (scored_clients := clients_of(summary, summary["last"], f"personal/{name}")):
        texts["clients"] = scored_clients
    return texts
