"""Read scores from the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]


def primary_of(summary: Summary) -> str:
    """Return the name of the primary metric of the task in a summary, such as "auc"; "accuracy" if it has none."""
    return (summary.get("task") or {}).get("primary", "accuracy")


def score_of(summary: Summary | None) -> float:
    """Return the score of a run that a sweeper optimizes; NaN if there is none.

    It is the best validation score if clients have validation samples, else the test score of the last round.
    """
    primary = primary_of(summary or {})
    if has_validation(summary):
        return value_in(summary, "best_val", f"val/{primary}")
    return value_in(summary, "last", f"personal/{primary}")


def has_validation(summary: Summary | None) -> bool:
    """Return whether the last evaluation in a summary has metrics on validation samples; False without a summary."""
    return any(name.startswith("val/") for name in _values_of(summary, "last"))


def value_in(summary: Summary | None, entry: str, column: str) -> float:
    """Return a metric of a summary.

    Args:
        summary: The content of summary.json.
        entry: The evaluation: "last", "best" (by test score) or "best_val" (by validation score).
        column: The metric, as in metrics.csv.

    Returns:
        The value; NaN if there is none.
    """
    value = _values_of(summary, entry).get(column)
    return float(value) if isinstance(value, int | float) else math.nan


def _values_of(summary: Summary | None, entry: str) -> Mapping[str, Any]:
    """Return the metrics of an evaluation by name; {} if the summary is None or does not have them.

    Args:
        summary: The content of summary.json.
        entry: The evaluation: "last", "best" or "best_val".
    """
    values = (summary or {}).get(entry)
    if isinstance(values, dict) and entry != "last":  # best ones are {"metric": ..., "round": ..., "values": ...}
        values = values.get("values")
    return values if isinstance(values, dict) else {}
