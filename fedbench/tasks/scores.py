"""The direction of metrics, and their summaries over clients: means, standard deviation, worst clients.

A metric that is not defined for a client (no samples, one class) is NaN, and every mean leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbench.core.options import ConfigError, listed, require


class Direction(NamedTuple):
    """The direction and the unit of a metric.

    Attributes:
        higher_is_better: Whether larger values are better.
        fraction: Whether it is a fraction of 1.  Reports show it in per cent.
    """

    higher_is_better: bool
    fraction: bool


# Directions by name of a metric.  These are for old runs, which did not store them; tasks and runs register all others.
_SCORE = Direction(higher_is_better=True, fraction=True)
ATTACK_SUCCESS = "attack_success"  # of a backdoor; lower is better for the defender
DIRECTIONS = {
    ATTACK_SUCCESS: Direction(higher_is_better=False, fraction=True),
    "loss": Direction(higher_is_better=False, fraction=False),
    **dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "auc"), _SCORE),
    **dict.fromkeys(("iou", "dice_iou", "label_iou", "label_iou_majority"), _SCORE),
}
SUFFIXES = ("_weighted", "_std", "_worst")  # of a metric in the result of `summarize_clients`
COUNT_SUFFIX = "_clients"  # the number of clients in a mean that leaves some out


def register_directions(directions: Mapping[str, Direction]) -> None:
    """Register the directions of metrics, of a task or of stored runs, in the global dict DIRECTIONS.

    Args:
        directions: From the name of a metric to its direction.

    Raises:
        ConfigError: A metric of the same name has another direction.
    """
    for name, new in directions.items():
        registered = DIRECTIONS.setdefault(name, new)
        require(
            registered == new,
            f"the metric {name} differs between two tasks, {_describe(registered)} in one and {_describe(new)} in the "
            "other: rename it in one class, or set it to the same in higher_is_better and fractions of both",
        )


def _describe(direction: Direction) -> str:
    """Return a metric's direction and unit for a message, for example "(higher is better, a fraction of 1)"."""
    better = "higher is better" if direction.higher_is_better else "lower is better"
    return f"({better}, {'a fraction of 1' if direction.fraction else 'not a fraction'})"


def direction(column: str) -> Direction:
    """Return the direction of a metric.

    Args:
        column: A metric or a column of metrics.csv, such as personal/accuracy_worst.  For a standard deviation
            (``_std``), lower is better.

    Raises:
        ConfigError: No task has registered the metric.
    """
    name = column.rpartition("/")[2]
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")  # _weighted, _std or _worst
    registered = DIRECTIONS.get(name.removesuffix(suffix))
    if registered is None:
        raise ConfigError(
            f"the metric {column} is unknown, so that fedbench cannot know whether higher is better: choose one of "
            f"{listed(DIRECTIONS, most=30)}, or add it to higher_is_better of the class of its task"
        )
    return registered._replace(higher_is_better=False) if suffix == "_std" else registered


def is_better(column: str, value: float, reference: float) -> bool:
    """Return whether a value of a metric is better than a reference value.

    Args:
        column: The metric, or a column of metrics.csv, such as personal/accuracy_worst.
        value: The value.
        reference: The value to compare with.  Every number is better than NaN, and NaN is never better.
    """
    if np.isnan(value) or np.isnan(reference):
        return bool(np.isnan(reference) and not np.isnan(value))
    return value > reference if direction(column).higher_is_better else value < reference


def defined_counts(values: Mapping[str, float]) -> dict[str, int]:
    """Return the number of clients in each mean that leaves clients out because their metric is NaN.

    Args:
        values: A result of `summarize_clients`: value by column, where m_clients is this number for the metric m.  It
            may have further columns.

    Returns:
        Numbers of clients by metric, for the metrics that some but not all clients have.
    """
    metrics = (name.removesuffix(COUNT_SUFFIX) for name in values if name.endswith(COUNT_SUFFIX))
    return {name: int(values[name + COUNT_SUFFIX]) for name in metrics if name in values}


def summarize_clients(values: dict[str, np.ndarray], num_test: np.ndarray) -> dict[str, float]:
    """Summarize each metric over the clients for which it is not NaN.

    Args:
        values: Metrics of each client, [N] by name.
        num_test: The number of test samples of each client, [N].

    Returns:
        For each metric m:

        - m: the unweighted mean.
        - m_weighted: the mean weighted by num_test.
        - m_std: the population standard deviation (ddof=0), which papers of the field report.
        - m_worst: the mean of the worst tenth of the clients (their number is rounded down, but at least one).
        - m_clients: the number of clients for which m is defined, only if these are some but not all.

        The first four are NaN if the metric is NaN for all clients, and m_weighted if no client has test samples.
    """
    summary: dict[str, float] = {}
    for name, value in values.items():
        defined = ~np.isnan(value)  # [N]
        value = np.asarray(value)[defined]  # [k]
        weight = np.asarray(num_test)[defined]  # [k]
        summary |= {name + suffix: float("nan") for suffix in ("", *SUFFIXES)}
        if len(value):
            ascending = np.sort(value)
            tenth = max(1, len(value) // 10)
            worst = ascending[:tenth] if direction(name).higher_is_better else ascending[-tenth:]
            summary[name] = float(value.mean())
            if weight.sum() > 0:
                summary[name + "_weighted"] = float((weight * value).sum() / weight.sum())
            summary[name + "_std"] = float(value.std())
            summary[name + "_worst"] = float(worst.mean())
        if 0 < len(value) < len(defined):
            summary[name + COUNT_SUFFIX] = len(value)
    return summary
