"""Whether the private names of a library that fedbench uses are still there."""

import importlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any


def gone(names: Iterable[str]) -> list[str]:
    """The dotted names that the installed libraries have not; `()` behind a class asks an instance of it."""
    return [name for name in names if not _is_there(name)]


def sentence(distribution: str, names: Iterable[str], module: str) -> str:
    """What to do when some are gone; "" where all are there."""
    missing = gone(names)
    if not missing:
        return ""
    return f"{distribution} {version(distribution)} has no {', '.join(missing)} any more: mend {module}"


def _is_there(name: str) -> bool:
    parts = name.split(".")
    module, value = next(((i, m) for i in range(len(parts), 0, -1) if (m := _module(parts[:i])) is not None), (0, None))
    for part in parts[module:]:
        if not hasattr(value, part.removesuffix("()")):
            return False
        value = getattr(value, part.removesuffix("()"))
        value = value() if part.endswith("()") else value
    return module > 0


def _module(parts: list[str]) -> Any:
    try:
        return importlib.import_module(".".join(parts))
    except (ImportError, TypeError):
        return None
