"""fedbench: federated and personalized federated learning experiments, every client a row of a matrix."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbench.api.commands import load, run, sweep
    from fedbench.api.runs import Run, Runs

__all__ = ["Run", "Runs", "load", "run", "sweep"]
__version__ = "0.1.0"
_FOUND_IN = {"run": "commands", "sweep": "commands", "load": "commands", "Run": "runs", "Runs": "runs"}


def __getattr__(name: str) -> Any:
    """What notebooks call (docs/notebooks.md), imported when it is first asked for: ``import fedbench`` stays light."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'fedbench' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedbench.api.{_FOUND_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
