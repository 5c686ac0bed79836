"""Scores of one run: at its last and best rounds, of each client against Local, to a target, and bytes sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fedbench.core.options import require
from fedbench.report.runs import Run
from fedbench.report.table import DataFrame, Series, pandas
from fedbench.tasks.scores import COUNT_SUFFIX, SUFFIXES, direction

SELECTIONS = ("last", "best", "best_val")
ROUNDS = ("last", "own_best")  # of a client's gain: the last round, or its best one
NAN = float("nan")


@dataclass
class Options:
    """What the report is asked for; ``group`` are the config keys to group by, or None: all but the seed."""

    metric: str = "personal/accuracy"
    select: str = "last"
    target: float = 0.7
    group: list[str] | None = None

    @property
    def form(self) -> dict[str, Any]:
        """The digits and scale of the metric's columns."""
        return {"digits": 2 if is_fraction(self.metric) else 4, "scale": scale_of(self.metric)}

    @property
    def goal(self) -> str:
        """The target as a reader sees it."""
        return f"{self.target * self.form['scale']:g}" + ("%" if is_fraction(self.metric) else "")


def lower_is_better(metric: str) -> bool:
    """Return whether the smaller of two values of a metric is the better one."""
    return not direction(metric).higher_is_better


def is_fraction(metric: str) -> bool:
    """Return whether a metric lies in [0, 1] and is shown in percent."""
    return direction(metric).fraction


def scale_of(metric: str) -> int:
    """Return 100 for a metric that is shown in percent, 1 for others."""
    return 100 if is_fraction(metric) else 1


def primary_metric(runs: list[Run]) -> str:
    """Return the primary metric of the runs.

    Raises:
        ConfigError: They have several.
    """
    columns = sorted({run.primary for run in runs if len(run.metrics)}) or ["personal/accuracy"]
    require(
        len(columns) == 1,
        f"the runs went by {' and '.join(columns)}: name one of them, as in --metric {columns[0]}",
    )
    return columns[0]


def check_metric(metric: str, target: float, runs: list[Run]) -> None:
    """Refuse a metric that no run has, naming the nearest ones, and a target that is no value of it."""
    known = sorted({name for run in runs for name in run.metrics})
    if metric not in known and known:
        ends = [name for name in known if name.rpartition("/")[2] == metric.rpartition("/")[2]]
        near = ends or get_close_matches(metric, known, 4, 0.4) or known[:4]
        require(False, f"no run has the metric {metric}; the nearest are {', '.join(near)}")
    require(
        not is_fraction(metric) or 0 <= target <= 1,
        f"--target is {target:g}; {metric} is at most 1 and at least 0",
    )


def curve(run: Run, metric: str) -> Series:
    """Return a metric by round [R]; empty if it was not measured."""
    return run.metrics[metric] if metric in run.metrics else pandas().Series(dtype=float)


def selected_round(run: Run, metric: str, select: str) -> float | None:
    """Return the last round, the first of the best ones, or the best by validation; None if there is none."""
    values = curve(run, metric)
    if select == "best_val":
        return (run.summary.get("best_val") or {}).get("round")
    if select == "last":
        return float(values.index[-1]) if len(values) else None
    best = values.dropna()
    return None if best.empty else float(best.idxmin() if lower_is_better(metric) else best.idxmax())


def best_of(values: Any, metric: str) -> Any:
    """Return the best values along the first axis without NaN."""
    return pandas().DataFrame(values).agg("min" if lower_is_better(metric) else "max").to_numpy()


def value_at(run: Run, metric: str, round: float | None) -> float:
    """Return a metric at a round; NaN where there is none."""
    return float(curve(run, metric).get(round, NAN))


def clients_at(run: Run, metric: str, round: float | None) -> str:
    """Return how many clients are in the mean of a metric at a round, as "3 of 6"; "" if all are."""
    metric = next((metric.removesuffix(end) for end in SUFFIXES if metric.endswith(end)), metric)
    total, counted = run.summary.get("num_clients"), run.summary.get("evaluated_clients", math.nan)
    for at, values in _kept_values(run):
        if at == round and metric in values:
            counted = values.get(f"{metric}{COUNT_SUFFIX}", counted)
    if not math.isnan(in_table := value_at(run, f"{metric}{COUNT_SUFFIX}", round)):
        counted = in_table
    if math.isnan(counted) and round is not None:  # a run of an older version, without these numbers
        values = run.clients(metric)
        counted = values.loc[round].count() if round in values.index else math.nan
    return "" if math.isnan(counted) or counted == total else f"{counted:.0f} of {total}"


def _kept_values(run: Run) -> list[tuple[float | None, dict[str, float]]]:
    """Return the rounds whose metrics the summary has, and these metrics."""
    kept = [run.summary.get(name) or {} for name in ("best", "best_val")]
    last = (run.summary.get("rounds_done"), run.summary.get("last") or {})
    return [last, *((entry.get("round"), entry.get("values") or {}) for entry in kept)]


def rounds_to(run: Run, metric: str, target: float) -> float:
    """Return the first evaluated round (from 1) at which the metric reaches the target; NaN if it never does."""
    values = curve(run, metric)
    reached = values <= target if lower_is_better(metric) else values >= target
    return float(reached.idxmax()) if reached.any() else NAN


def seconds_to(run: Run, round: float) -> float:
    """Return the seconds of training and server step up to and including a round; NaN for NaN."""
    return NAN if math.isnan(round) or "train_s" not in run.costs else float(run.costs["train_s"].loc[:round].sum())


def is_local(run: Run) -> bool:
    """Return whether this is a finished run of plain Local, the reference of the gains."""
    return run.finished and run.choice("algorithm") == "local" and not run.flat_config.get("finetune.epochs")


def local_of(run: Run, runs: list[Run]) -> Run | None:
    """Return the run of Local on the same data set, partition and seed, as long; of several, the most alike."""
    if is_local(run):
        return run
    keys = ("dataset", "partition_hash", "seed", "rounds")
    same = [r for r in runs if is_local(r) and all(r.summary.get(k) == run.summary.get(k) for k in keys)]

    def alike(other: Run) -> int:
        return sum(name in other.flat_config and other.flat_config[name] == value
                   for name, value in run.flat_config.items())  # fmt: skip

    return max(same, key=alike, default=None)


def gains(run: Run, local: Run | None, metric: str, at: str = "last") -> Series:
    """Return each client's score less that of Local [N], positive is better; empty if a run has no clients.

    at: last, the last round; own_best, each client at its best round, in both runs.
    """
    ours, theirs = (one.clients(metric) if one is not None else pandas().DataFrame() for one in (run, local))
    if not len(ours) or not len(theirs):
        return pandas().Series(dtype=float)
    sign = -1 if lower_is_better(metric) else 1
    a, b = (_by_client(values, metric, at) for values in (ours, theirs))
    each = sign * (a - b).loc[a.index.intersection(b.index)]
    return each if each.notna().any() else each.iloc[:0]


def _by_client(values: DataFrame, metric: str, at: str) -> Series:
    if at == "last":
        return values.iloc[-1]
    return values.min() if lower_is_better(metric) else values.max()


def megabytes(run: Run, directions: tuple[str, ...], kind: str = "bytes") -> Series:
    """Return the MB (10^6 bytes, of all clients) sent up to and including each round [R]; empty without costs.csv.

    kind: "bytes", or "dense", as they would have been without compression (the same where there was none).
    """
    costs = run.costs
    if not {f"bytes_{d}" for d in directions} <= set(costs):
        return pandas().Series(dtype=float)
    names = [f"{kind}_{d}" if f"{kind}_{d}" in costs else f"bytes_{d}" for d in directions]
    return costs[names].sum(axis=1).cumsum() / 1e6


def is_compressed(run: Run) -> bool:
    """Return whether its messages were compressed."""
    return "dense_up" in run.costs


def scores_of(run: Run, options: Options, runs: list[Run]) -> dict[str, Any]:
    """Return what a finished run reached and sent; ``runs`` are searched for its run of Local."""
    metric, cost = options.metric, run.summary.get("cost") or {}
    rounds = {name: selected_round(run, metric, name) for name in SELECTIONS}
    selected = rounds[options.select]
    to_target = rounds_to(run, metric, options.target)
    gain = gains(run, None if is_local(run) else local_of(run, runs), metric)
    found: dict[str, Any] = {name: value_at(run, metric, at) for name, at in rounds.items()}
    found |= {
        "best_round": rounds["best"],
        "counted": clients_at(run, metric, selected) or None,
        "worst": value_at(run, f"{metric}_worst", selected),
        "global": value_at(run, metric.replace("personal/", "global/"), selected),
        "gain_last": float(gain.mean()),
        "gain_last_clients": float(gain.std(ddof=0)),
        "rounds_to_target": to_target,
        "seconds_to_target": seconds_to(run, to_target),
        **{key: cost.get(key) for key in ("images_per_s", "train_s")},
        "mb_to_target": float(megabytes(run, ("down", "up")).get(to_target, NAN)),
    }
    for d in ("up", "down"):
        sent, dense = (megabytes(run, (d,), kind).iloc[-1:].max() for kind in ("bytes", "dense"))
        found |= {f"mb_{d}": float(sent), f"part_{d}": float(sent / dense) if dense else NAN}
    return found
