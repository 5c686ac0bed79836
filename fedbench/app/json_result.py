"""The JSON object of a run or a sweep that ``python -m fedbench ... --json`` prints (docs/json.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbench.app.single import Attempt
from fedbench.app.sweep import Swept
from fedbench.core.files import read_json
from fedbench.core.json_output import print_error, print_json
from fedbench.simulation.result import primary_of, value_in
from fedbench.simulation.status import STATUS_FILE
from fedbench.simulation.summary_text import command_of

# Of summary.json: what was run.
SETTING = ("name", "algorithm", "dataset", "partition", "model", "seed", "rounds", "rounds_done", "num_clients")


def print_result(result: Attempt | Swept) -> None:
    """Print the result of a run or a sweep as one JSON object; of a failed run, its error.

    A single run has either a result (``ended``) or an exception (``error``).
    """
    if isinstance(result, Swept):
        runs = [run_data(result.folder / row["run"], row["status"], row["sentence"]) for row in result.rows]
        print_json("sweep", {"folder": result.folder, "exit_code": result.status, "runs": runs})
    elif result.ended is not None:
        # already: the run was finished before this command
        status = "finished already" if result.ended.already else result.ended.summary["status"]
        sentence = str(read_json(result.folder / STATUS_FILE).get("sentence", ""))
        print_json("run", run_data(result.folder, status, sentence))
    elif result.error is not None:
        print_error(result.error, result.reason, result.status)


def run_data(folder: Path, status: str, message: str = "") -> dict[str, Any]:
    """Return what a run was, its scores and its cost.

    Args:
        folder: The run folder.
        status: What became of the run, such as "finished", "finished already" or "failed".
        message: Why a run is not finished; "" for others.

    Returns:
        The values by key, None for those that an unfinished run does not have.
    """
    summary = read_json(folder / "summary.json")
    primary, cost = primary_of(summary), summary.get("cost") or {}
    directions = (summary.get("task") or {}).get("scores") or {}
    return {
        **{"folder": folder, "status": status, "message": message},
        **{key: summary.get(key) for key in SETTING},  # such as the method and the data set
        "overrides": command_of(folder)[1],  # [0] is --config-dir
        "metric": f"personal/{primary}" if summary else None,
        "higher_is_better": (directions.get(primary) or {}).get("higher_is_better"),
        "last": _scores(summary, "last", primary, summary.get("rounds_done")),
        "best_val": _scores(summary, "best_val", primary, (summary.get("best_val") or {}).get("round")),
        "cost": {key: cost.get(key) for key in ("total_s", "bytes_down", "bytes_up")},
    }


def _scores(summary: Mapping[str, Any], entry: str, primary: str, round: int | None) -> dict[str, Any] | None:
    """Return the scores of an evaluation by the primary metric; None if there is none, or it is not finite.

    Args:
        summary: The content of summary.json.
        entry: "last" or "best_val".
        primary: The primary metric, such as "accuracy".
        round: The round of the evaluation.
    """
    test = value_in(summary, entry, f"personal/{primary}")
    if not math.isfinite(test):  # value_in returns nan for a missing value
        return None
    columns = {"std_over_clients": f"personal/{primary}_std", "worst_tenth": f"personal/{primary}_worst"}
    columns |= {"global": f"global/{primary}", "validation": f"val/{primary}"}
    return {"round": round, "test": test, **{key: value_in(summary, entry, name) for key, name in columns.items()}}
