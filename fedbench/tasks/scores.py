"""What scores mean, and what is made of them over clients: which of two is better, means, spread, the worst.

A score that is not defined for a client (no samples, one class) is NaN, never 0, and is skipped in every mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbench.core.options import require


class Direction(NamedTuple):
    """What a metric's numbers mean: which of two is better, and whether they are shares of 1, shown in per cent."""

    higher_is_better: bool
    fraction: bool


SCORE = Direction(higher_is_better=True, fraction=True)
# Of the scores that runs had before they recorded what theirs mean; tasks and runs declare all others.
DIRECTIONS = {
    "loss": Direction(higher_is_better=False, fraction=False),
    **dict.fromkeys(("accuracy", "balanced_accuracy", "f1", "auc"), SCORE),
    **dict.fromkeys(("iou", "dice_iou", "label_iou", "label_iou_majority"), SCORE),
}
ENDS = ("_weighted", "_std", "_worst")  # of what over_clients makes of a metric
COUNT = "_clients"  # suffix of the number of clients in a mean that leaves some out


def declare(directions: Mapping[str, Direction]) -> None:
    """Make known what scores mean: a task declares its own, a report those of the runs it reads.

    ConfigError where a score of that name means something else already.
    """
    for name, given in directions.items():
        known = DIRECTIONS.setdefault(name, given)
        require(
            known == given,
            f"the score {name} is known as {_in_words(known)}, and a task declares it as {_in_words(given)}: "
            "give it another name",
        )


def _in_words(direction: Direction) -> str:
    better = "better high" if direction.higher_is_better else "better low"
    return f"{better}, {'a share of 1' if direction.fraction else 'in units of its own'}"


def direction(column: str) -> Direction:
    """That of a metric, also of a column such as personal/accuracy_worst; of a spread (_std) the smaller is better.

    ConfigError for one that was not declared: nothing is guessed from a name.
    """
    name = column.rpartition("/")[2]
    end = next((end for end in ENDS if name.endswith(end)), "")
    known = DIRECTIONS.get(name.removesuffix(end))
    require(
        known is not None,
        f"whether {column} is better high or low is not known; higher_is_better of a task tells it, so far of "
        f"{', '.join(DIRECTIONS)}",
    )
    assert known is not None
    return known._replace(higher_is_better=False) if end == "_std" else known


def is_better(column: str, value: float, than: float) -> bool:
    """Whether a value of a metric is better than another one; a number is better than NaN."""
    if value != value or than != than:
        return value == value and than != than
    return value > than if direction(column).higher_is_better else value < than


def counts(values: Mapping[str, float]) -> dict[str, int]:
    """Return the numbers of clients from `over_clients`, by the metric whose mean leaves some out."""
    metrics = (name.removesuffix(COUNT) for name in values if name.endswith(COUNT))
    return {name: int(values[name + COUNT]) for name in metrics if name in values}


def over_clients(values: dict[str, np.ndarray], num_test: np.ndarray) -> dict[str, float]:
    """For each score m [N] of a task: ``m``, ``m_weighted``, ``m_std``, ``m_worst``, and where needed ``m_clients``.

    They are the unweighted mean over clients, the mean weighted by ``num_test`` [N], the population standard
    deviation (ddof 0, the papers' habit), and the mean over the worst decile (a tenth of the clients, rounded
    down, at least one; the largest where lower is better).  NaN clients are left out; with none left the value is NaN.
    ``m_clients`` is the number of clients that the score is defined for, given only where these are
    some and not all.
    """
    summary: dict[str, float] = {}
    for name, value in values.items():
        defined = ~np.isnan(value)  # [N]
        value, weight = np.asarray(value)[defined], np.asarray(num_test)[defined]  # [k]
        summary |= {name + end: float("nan") for end in ("", "_weighted", "_std", "_worst")}
        if len(value):
            ascending = np.sort(value)
            few = max(1, len(value) // 10)
            worst = ascending[:few] if direction(name).higher_is_better else ascending[-few:]
            summary[name] = float(value.mean())
            summary[name + "_weighted"] = float(
                (weight * value).sum() / weight.sum() if weight.sum() > 0 else float("nan")
            )
            summary[name + "_std"] = float(value.std())
            summary[name + "_worst"] = float(worst.mean())
        if 0 < len(value) < len(defined):
            summary[name + COUNT] = len(value)
    return summary
