"""Values of a run's summary: the metric it is judged by, and the score that a sweeper gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]


def primary_of(summary: Summary) -> str:
    """Return the name of the metric by which a run is judged."""
    return (summary.get("task") or {}).get("primary", "accuracy")


def score_of(summary: Summary | None) -> float:
    """Return the score of a run for sweepers; NaN if there is none.

    It is the best validation score if clients have validation parts, else the test score of the last round.
    """
    part = "val" if has_validation(summary) else "personal"
    return value_in(summary, "best_val" if part == "val" else "last", f"{part}/{primary_of(summary or {})}")


def has_validation(summary: Summary | None) -> bool:
    """Return whether the run evaluated validation parts."""
    return any(name.startswith("val/") for name in _values_of(summary, "last"))


def value_in(summary: Summary | None, entry: str, column: str) -> float:
    """Return a metric of the last round (entry: last) or of the best one (best, best_val); NaN if there is none."""
    value = _values_of(summary, entry).get(column)
    return float(value) if isinstance(value, int | float) else math.nan


def _values_of(summary: Summary | None, entry: str) -> Mapping[str, Any]:
    values = (summary or {}).get(entry)
    if isinstance(values, dict) and entry != "last":
        values = values.get("values")
    return values if isinstance(values, dict) else {}
