"""Checks for methods, models, adapters, tasks, partitions, compressors, aggregation rules and callbacks of users.

``check_algorithm(MyMethod).raise_if_failed()`` in a test, or ``fedbench check my_package.MyMethod``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbench.testing._suite import Outcome, Report
    from fedbench.testing.adapter import check_adapter
    from fedbench.testing.aggregator import check_aggregator
    from fedbench.testing.algorithm import check_algorithm
    from fedbench.testing.callback import check_callback
    from fedbench.testing.compression import check_compression
    from fedbench.testing.model import check_model
    from fedbench.testing.partition import check_partition
    from fedbench.testing.task import check_task

__all__ = [
    "Outcome",
    "Report",
    "check_adapter",
    "check_aggregator",
    "check_algorithm",
    "check_callback",
    "check_compression",
    "check_model",
    "check_partition",
    "check_task",
]


def __getattr__(name: str) -> Any:
    """Import the object with a public name of this package, and return it; AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = name.removeprefix("check_") if name.startswith("check_") else "_suite"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
