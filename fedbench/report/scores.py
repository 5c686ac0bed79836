"""What is said of one run and metric: at the last round, the best, per client against Local, to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from fedbench.core.options import require
from fedbench.report.runs import Run
from fedbench.tasks.scores import COUNT, ENDS, direction

SELECTIONS = ("last", "best", "best_val")
GAINS = ("last", "best_mean", "own_best")


@dataclass
class Gain:
    """Per-client difference to Local, positive is better: ``each`` [N], mean, population std, share > 0."""

    each: np.ndarray
    mean: float
    std: float
    better: float


def lower_is_better(metric: str) -> bool:
    """Whether the smaller of two values of a metric is the better one (fedbench/tasks/scores.py says)."""
    return not direction(metric).higher_is_better


def is_fraction(metric: str) -> bool:
    """Whether a metric lies in [0, 1] and is shown in percent."""
    return direction(metric).fraction


def primary_metric(runs: list[Run]) -> str:
    """The column that the runs went by; ConfigError where they went by several."""
    columns = sorted({run.primary for run in runs if run.metrics}) or ["personal/accuracy"]
    require(
        len(columns) == 1,
        f"the runs went by {' and '.join(columns)}: name one of them, as in --metric {columns[0]}",
    )
    return columns[0]


def check_metric(metric: str, runs: list[Run]) -> None:
    """Refuse a metric that no run has, naming the nearest ones."""
    known = sorted({name for run in runs for name in run.metrics if name != "round"})
    if metric not in known and known:
        ends = [name for name in known if name.rpartition("/")[2] == metric.rpartition("/")[2]]
        near = ends or get_close_matches(metric, known, 4, 0.4) or known[:4]
        require(False, f"no run has the metric {metric}; the nearest are {', '.join(near)}")


def curve(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(rounds [R], values [R]) of a metric; both empty where it was not measured."""
    empty = np.empty(0)
    return (run.metrics["round"], run.metrics[metric]) if {"round", metric} <= run.metrics.keys() else (empty, empty)


def best_row(values: np.ndarray, metric: str) -> int | None:
    """Index of the best value, the first of equal ones; None where all are NaN."""
    if not len(values) or np.isnan(values).all():
        return None
    return int(np.nanargmin(values) if lower_is_better(metric) else np.nanargmax(values))


def selected_round(run: Run, metric: str, select: str) -> float | None:
    """The round that ``select`` means for this run; None where it has no such round."""
    rounds, values = curve(run, metric)
    if select == "best_val":
        return (run.summary.get("best_val") or {}).get("round")
    row = best_row(values, metric) if select == "best" else len(values) - 1
    return None if row is None or row < 0 else float(rounds[row])


def best_of(values: np.ndarray, metric: str) -> np.ndarray:
    """The best values along the first axis, NaN left out; NaN where all are."""
    return (np.fmin if lower_is_better(metric) else np.fmax).reduce(values, axis=0)


def value_at(run: Run, metric: str, round: float | None) -> float:
    """A metric at a round; NaN where there is none."""
    rounds, values = curve(run, metric)
    at_round = values[rounds == round] if len(values) else values
    return float(at_round[0]) if len(at_round) else float("nan")


def clients_at(run: Run, metric: str, round: float | None) -> str:
    """Return how many clients are in the mean of a metric at a round, as "3 of 6"; "" if all are."""
    metric = next((metric.removesuffix(end) for end in ENDS if metric.endswith(end)), metric)
    total, counted = run.summary.get("num_clients"), run.summary.get("evaluated_clients", math.nan)
    for at, values in _kept_values(run):
        if at == round and metric in values:
            counted = values.get(f"{metric}{COUNT}", counted)
    if not math.isnan(in_table := value_at(run, f"{metric}{COUNT}", round)):
        counted = in_table
    if math.isnan(counted) and round is not None:  # a run of an older version, without these numbers
        rounds, _, values = run.clients(metric)
        row = value_row(rounds, round)
        counted = math.nan if row is None else (~np.isnan(values[row])).sum()
    return "" if math.isnan(counted) or counted == total else f"{counted:.0f} of {total}"


def _kept_values(run: Run) -> list[tuple[float | None, dict[str, float]]]:
    """Return the rounds whose metrics the summary keeps, and these metrics."""
    kept = [run.summary.get(name) or {} for name in ("best", "best_val")]
    last = (run.summary.get("rounds_done"), run.summary.get("last") or {})
    return [last, *((entry.get("round"), entry.get("values") or {}) for entry in kept)]


def rounds_to(run: Run, metric: str, target: float) -> float:
    """The first evaluated round (from 1) at which the metric reaches the target; NaN if it never does."""
    rounds, values = curve(run, metric)
    with np.errstate(invalid="ignore"):
        reached = values <= target if lower_is_better(metric) else values >= target
    return float(rounds[reached][0]) if reached.any() else float("nan")


def seconds_to(run: Run, round: float) -> float:
    """Seconds of training and server step, without evaluation, up to and including a round; NaN for NaN."""
    if np.isnan(round) or "train_s" not in run.costs:
        return float("nan")
    return float(run.costs["train_s"][run.costs["round"] <= round].sum())


def is_local(run: Run) -> bool:
    """Whether this is a finished run of plain Local, the reference of the gains."""
    return run.finished and run.choice("algorithm") == "local" and not run.flat_config.get("finetune.epochs")


def local_of(run: Run, runs: list[Run]) -> Run | None:
    """The run of Local on the same data set, partition and seed, as long; of several, the most alike."""
    if is_local(run):
        return run
    keys = ("dataset", "partition_hash", "seed", "rounds")
    same = [r for r in runs if is_local(r) and all(r.summary.get(k) == run.summary.get(k) for k in keys)]

    def alike(other: Run) -> int:
        return sum(name in other.flat_config and other.flat_config[name] == value
                   for name, value in run.flat_config.items())  # fmt: skip

    return max(same, key=alike, default=None)


def gains(run: Run, local: Run, metric: str) -> dict[str, Gain]:
    """g_i = metric_i(run) - metric_i(Local) by the three conventions (protocols of the PFL papers).

    last: at the last round.  best_mean: each at its own round of best mean over clients.  own_best: each
    client at its own best round, in both runs.
    """
    ours, theirs = _by_convention(run, metric), _by_convention(local, metric)
    sign = -1 if lower_is_better(metric) else 1
    by_convention = {}
    for name in ours.keys() & theirs.keys():
        (ids, a), (local_ids, b) = ours[name], theirs[name]
        _, i, j = np.intersect1d(ids, local_ids, return_indices=True)
        each = sign * (a[i] - b[j])  # [N]
        known = each[~np.isnan(each)]
        if len(known):
            by_convention[name] = Gain(each, float(known.mean()), float(known.std()), float((known > 0).mean()))
    return by_convention


def _by_convention(run: Run, metric: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Client ids [N] and a value for each [N], by convention."""
    rounds, ids, values = run.clients(metric)  # [R], [N], [R, N]
    if not len(rounds):
        return {}
    best = value_row(rounds, selected_round(run, metric, "best"))
    by_convention = {"last": (ids, values[-1]), "own_best": (ids, best_of(values, metric))}
    return by_convention | ({"best_mean": (ids, values[best])} if best is not None else {})


def value_row(rounds: np.ndarray, round: float | None) -> int | None:
    """Index of a round, None where it is not there."""
    where = np.flatnonzero(rounds == round)
    return int(where[0]) if len(where) else None


def kendall_tau(a: Iterable[float], b: Iterable[float]) -> float:
    """Kendall's tau-b of two rankings of the same things, in [-1, 1]; NaN where one has only ties."""
    x, y = np.array(list(a), dtype=np.float64), np.array(list(b), dtype=np.float64)
    i, j = np.triu_indices(len(x), 1)
    dx, dy = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])  # [pairs]
    known = np.sqrt(float((dx != 0).sum()) * float((dy != 0).sum()))
    return float((dx * dy).sum() / known) if known else float("nan")
