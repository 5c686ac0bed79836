"""Flatten nested mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(
    values: Mapping[str, Any], separator: str = ".", prefix: str = "", drop_empty: bool = False
) -> dict[str, Any]:
    """Flatten nested mappings, joining their keys: {"a": {"b": 1}} becomes {"a.b": 1}.

    Args:
        values: The nested mappings.  Lists are values.
        separator: The text between keys.
        prefix: The text before each key.
        drop_empty: Whether to omit empty mappings, which are values otherwise.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and (value or drop_empty):
            flat.update(flatten(value, separator, f"{prefix}{key}{separator}", drop_empty))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
