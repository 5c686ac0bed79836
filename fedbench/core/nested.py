"""Nested mappings: as one flat mapping, and mapped entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def map_inputs(function: Callable[[Any], Any], inputs: Any) -> Any:
    """function of a model's inputs: of the one tensor, or of each in a dict of named ones, as a dict again."""
    if isinstance(inputs, dict):
        return {name: function(value) for name, value in inputs.items()}
    return function(inputs)
