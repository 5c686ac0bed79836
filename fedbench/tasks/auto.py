"""The task that the targets of the data set determine."""

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.tasks.base import Task, task_for


class Auto:
    """Choose the task by the targets of the data set.

    Args:
        **options: Options of that task.
    """

    def __init__(self, **options: Any):
        self.options = options

    def for_targets(self, kind: str) -> Task:
        """Return the task of a kind of targets.

        Args:
            kind: The kind of targets, ``Arrays.task``.

        Raises:
            ConfigError: The task does not have one of the options.
        """
        task = task_for(kind)
        try:
            return task(**self.options)
        except TypeError as error:
            keys = ", ".join(f"task.{name}" for name in self.options)
            raise ConfigError(
                f"{keys}: the data set's task is {kind}, and {str(error).replace('__init__()', task.__name__)}; "
                f"conf/task/{kind}.yaml lists its options"
            ) from error
