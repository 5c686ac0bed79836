"""The contract of methods, models, adapters, tasks, partitions, operators and callbacks, checked for your own.

``check_algorithm(MyMethod).raise_if_broken()`` in a test, or ``fedbench check my_package.MyMethod``.
"""

from fedbench.testing._suite import Outcome, Report
from fedbench.testing.adapter import check_adapter
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
    "check_algorithm",
    "check_callback",
    "check_compression",
    "check_model",
    "check_partition",
    "check_task",
]
