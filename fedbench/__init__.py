"""fedbench: experiments in federated and personalized federated learning.  Each client is a row of a matrix."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbench.api.commands import load, run, sweep
    from fedbench.api.runs import Run, Runs

__all__ = ["Run", "Runs", "load", "run", "sweep"]
__version__ = "0.1.0"
_MODULES = {"run": "commands", "sweep": "commands", "load": "commands", "Run": "runs", "Runs": "runs"}


def __getattr__(name: str) -> Any:
    """Import a name of the Python interface (docs/notebooks.md) at first use, so that ``import fedbench`` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbench' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedbench.api.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
