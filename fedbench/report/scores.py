"""Scores of one run: at selected rounds, gains over Local (clients that train alone), rounds to a target, MB sent."""

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
NAN = float("nan")


@dataclass
class Options:
    """Options of a report: metric, selected round (select), target to reach, and keys to group runs by.

    Attributes:
        metric: A column of metrics.csv.
        select: The round of scores: "last", "best" (by test score) or "best_val" (by validation score).
        target: The value of the metric to reach, a fraction for metrics in [0, 1].
        group: The config keys to group runs by; None for all keys but the seed.
    """

    metric: str = "personal/accuracy"
    select: str = "last"
    target: float = 0.7
    group: list[str] | None = None


def lower_is_better(metric: str) -> bool:
    """Return whether smaller values of a metric, such as "personal/loss", are better; ConfigError if it is unknown."""
    return not direction(metric).higher_is_better


def is_fraction(metric: str) -> bool:
    """Return whether a metric lies in [0, 1] and is displayed in percent; ConfigError if the metric is unknown."""
    return direction(metric).fraction


def scale_of(metric: str) -> int:
    """Return the factor by which a metric is displayed: 100 if it lies in [0, 1], as an accuracy, else 1."""
    return 100 if is_fraction(metric) else 1


def primary_metric(runs: list[Run]) -> str:
    """Return the metric by which the tasks of the runs compare models, such as "personal/accuracy".

    Raises:
        ConfigError: The runs have different primary metrics.
    """
    metrics = sorted({run.primary for run in runs if len(run.metrics)}) or ["personal/accuracy"]
    require(
        len(metrics) == 1,
        f"the tasks of the runs compare models by different metrics, {' and '.join(metrics)}: choose one, as in "
        f"--metric {metrics[0]}",
    )
    return metrics[0]


def check_metric(metric: str, target: float, runs: list[Run]) -> None:
    """Check that at least one run has the metric, and that the target is a possible value of it.

    Args:
        metric: A column of metrics.csv, such as "personal/accuracy".
        target: The value of the metric to reach.
        runs: The runs.  If none has been evaluated yet, every metric is accepted.

    Raises:
        ConfigError: No run has the metric, or the target is outside of [0, 1] for a fraction.
    """
    columns = sorted({name for run in runs for name in run.metrics})
    same_score = [name for name in columns if name.rpartition("/")[2] == metric.rpartition("/")[2]]
    nearest = same_score or get_close_matches(metric, columns, n=4, cutoff=0.4) or columns[:4]
    require(
        metric in columns or not columns,
        f"no run has the metric {metric}: choose one that the runs have; the nearest are {', '.join(nearest)}",
    )
    require(
        not is_fraction(metric) or 0 <= target <= 1,
        f"--target is {target:g}; {metric} is a fraction: give a value from 0 to 1",
    )


def curve(run: Run, metric: str) -> Series:
    """Return a metric at the evaluated rounds [R], indexed by round; empty if the run does not have it."""
    return run.metrics[metric] if metric in run.metrics else pandas().Series(dtype=float)


def selected_round(run: Run, metric: str, select: str) -> float | None:
    """Return the round at which a metric is reported; None if there is none.

    Args:
        run: The run.
        metric: A column of metrics.csv, such as "personal/accuracy".
        select: "last" for the last evaluated round, "best" for the first round with the best value of the metric, or
            "best_val" for the round with the best validation score of the run's task.
    """
    if select == "best_val":
        return (run.summary.get("best_val") or {}).get("round")
    values = curve(run, metric)
    if select == "last":
        return float(values.index[-1]) if len(values) else None
    values = values.dropna()
    if values.empty:
        return None
    return float(values.idxmin() if lower_is_better(metric) else values.idxmax())


def best_of(values: DataFrame, metric: str) -> Series:
    """Return the best value of each column.  NaN is ignored.

    Args:
        values: Values of the metric [rounds, clients].
        metric: The metric, which determines whether the largest or the smallest value is best.
    """
    return values.min() if lower_is_better(metric) else values.max()


def value_at(run: Run, metric: str, round: float | None) -> float:
    """Return the value of a metric at a round; NaN if the run has no such metric or round, or if the round is None."""
    return float(curve(run, metric).get(round, NAN))


def clients_at(run: Run, metric: str, round: float | None) -> str:
    """Return how many clients the mean of a metric includes at a round, as "3 of 6".

    Args:
        run: The run.
        metric: A column of metrics.csv.
        round: The round; None if there is none.

    Returns:
        The text; "" if the mean includes all clients, or if their number is not recorded.
    """
    # without a suffix for another statistic over the same clients, such as _std
    metric = next((metric.removesuffix(suffix) for suffix in SUFFIXES if metric.endswith(suffix)), metric)
    summary = run.summary
    counts = [value_at(run, f"{metric}{COUNT_SUFFIX}", round)]  # the first that is not NaN is used
    if summary.get("rounds_done") == round:
        counts.append((summary.get("last") or {}).get(f"{metric}{COUNT_SUFFIX}", NAN))
    for name in ("best", "best_val"):
        entry = summary.get(name) or {}
        if entry.get("round") == round:
            counts.append((entry.get("values") or {}).get(f"{metric}{COUNT_SUFFIX}", NAN))
    counts.append(summary.get("evaluated_clients", NAN))
    count = next((count for count in counts if not math.isnan(count)), NAN)
    if math.isnan(count) and round is not None:  # runs of earlier releases did not store counts
        values = run.clients(metric)
        count = values.loc[round].count() if round in values.index else NAN
    total = summary.get("num_clients")
    return "" if math.isnan(count) or count == total else f"{count:.0f} of {total}"


def rounds_to(run: Run, metric: str, target: float) -> float:
    """Return the first evaluated round (from 1) with at least the target (at most, if lower is better); else NaN."""
    values = curve(run, metric)
    reached = values <= target if lower_is_better(metric) else values >= target
    return float(reached.idxmax()) if reached.any() else NAN


def seconds_to(run: Run, round: float) -> float:
    """Return the seconds of training and server steps in rounds 1 to ``round``.

    It is NaN if ``round`` is NaN, because the target was not reached, or if the times are not recorded.
    """
    return NAN if math.isnan(round) or "train_s" not in run.costs else float(run.costs["train_s"].loc[:round].sum())


def is_local(run: Run) -> bool:
    """Return whether a run is finished, its algorithm is Local (clients train alone), and it does not fine-tune."""
    return run.finished and run.choice("algorithm") == "local" and not run.flat_config.get("finetune.epochs")


def local_of(run: Run, runs: list[Run]) -> Run | None:
    """Return the run of Local with the same data set, partition, seed and number of rounds.

    Args:
        run: A run.
        runs: The runs to search.

    Returns:
        ``run`` itself if it is one of Local; else the run of Local, of several the one that has the most config values
        in common with ``run``; None if there is none.
    """
    if is_local(run):
        return run
    keys = ("dataset", "partition_hash", "seed", "rounds")
    candidates = [
        other for other in runs
        if is_local(other) and all(other.summary.get(key) == run.summary.get(key) for key in keys)
    ]  # fmt: skip

    def common_values(other: Run) -> int:
        config = other.flat_config
        return sum(key in config and config[key] == value for key, value in run.flat_config.items())

    return max(candidates, key=common_values, default=None)


def gains(run: Run, local: Run | None, metric: str, own_best: bool = False) -> Series:
    """Return each client's score minus its score under Local; positive is better.

    Args:
        run: A run.
        local: The run of Local; None if there is none.
        metric: A column of clients.csv.
        own_best: Whether to compare each client's score at its own best round of one run with that at its own best
            round of the other.  If not, the last rounds are compared.

    Returns:
        The gains of the clients that both runs evaluated [N]; empty if a run has no scores of clients, or if all gains
        are undefined.
    """
    tables = [source.clients(metric) if source is not None else pandas().DataFrame() for source in (run, local)]
    if any(table.empty for table in tables):
        return pandas().Series(dtype=float)
    ours, theirs = (best_of(table, metric) if own_best else table.iloc[-1] for table in tables)
    difference = theirs - ours if lower_is_better(metric) else ours - theirs
    difference = difference.loc[ours.index.intersection(theirs.index)]
    return difference if difference.notna().any() else difference.iloc[:0]


def megabytes(run: Run, directions: tuple[str, ...], kind: str = "bytes") -> Series:
    """Return the cumulative communication of all clients.

    Args:
        run: A run.
        directions: "up" for uploads, "down" for downloads, or both.
        kind: "bytes" for the bytes that were sent, or "dense" for the bytes without compression.  In runs without
            compression, the two are equal.

    Returns:
        MB (10^6 bytes) in rounds 1 to r, for each round r [R]; empty without costs.csv.
    """
    costs = run.costs
    if any(f"bytes_{way}" not in costs for way in directions):
        return pandas().Series(dtype=float)
    names = [f"{kind}_{way}" if f"{kind}_{way}" in costs else f"bytes_{way}" for way in directions]
    return costs[names].sum(axis=1).cumsum() / 1e6


def is_compressed(run: Run) -> bool:
    """Return whether messages of the run were compressed, so that costs.csv has a column of uncompressed bytes."""
    return "dense_up" in run.costs


def scores_of(run: Run, options: Options, runs: list[Run]) -> dict[str, Any]:
    """Return the scores and costs of a finished run.

    Args:
        run: The run.
        options: The metric, the selected round and the target.
        runs: The runs among which the run of Local is searched.

    Returns:
        The scores by name: the metric at the rounds "last", "best" and "best_val"; "best_round"; at the selected round
        "counted" (clients in the mean), "worst" (mean of the worst tenth of clients) and "global" (global model);
        "gain_last" and "gain_last_clients" (mean and standard deviation over clients of the gain over Local); and the
        costs until the target or in total: rounds, seconds, MB, images per second.  "part_up" and "part_down" are sent
        bytes as a fraction of the bytes without compression.  Missing scores are NaN or None.
    """
    metric = options.metric
    cost = run.summary.get("cost") or {}
    rounds = {name: selected_round(run, metric, name) for name in SELECTIONS}
    selected = rounds[options.select]
    to_target = rounds_to(run, metric, options.target)
    gain = gains(run, None if is_local(run) else local_of(run, runs), metric)
    scores: dict[str, Any] = {name: value_at(run, metric, round) for name, round in rounds.items()}
    scores |= {
        "best_round": rounds["best"],
        "counted": clients_at(run, metric, selected) or None,
        "worst": value_at(run, f"{metric}_worst", selected),
        "global": value_at(run, metric.replace("personal/", "global/"), selected),
        "gain_last": float(gain.mean()),
        "gain_last_clients": float(gain.std(ddof=0)),
        "rounds_to_target": to_target,
        "seconds_to_target": seconds_to(run, to_target),
        "images_per_s": cost.get("images_per_s"),
        "train_s": cost.get("train_s"),
        "mb_to_target": float(megabytes(run, ("down", "up")).get(to_target, NAN)),
    }
    for way in ("up", "down"):
        # the total is the last cumulative value; max() of an empty slice is NaN
        transmitted, dense = (megabytes(run, (way,), kind).iloc[-1:].max() for kind in ("bytes", "dense"))
        scores[f"mb_{way}"] = float(transmitted)
        scores[f"part_{way}"] = float(transmitted / dense) if dense else NAN
    return scores
