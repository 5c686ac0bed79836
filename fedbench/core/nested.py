"""Nested mappings as one flat mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(
    values: Mapping[str, Any], separator: str = ".", prefix: str = "", drop_empty: bool = False
) -> dict[str, Any]:
    """Nested mappings as one, the keys joined by the separator; lists are values, and so are empty mappings unless they
    are dropped."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and (value or drop_empty):
            flat.update(flatten(value, separator, f"{prefix}{key}{separator}", drop_empty))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
