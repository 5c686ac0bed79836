"""The task that the targets of the data set determine."""

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.tasks.base import Task, task_for


class Auto:
    """Choose the task by the targets of the data set.  It gets the given task.* options, a dict from name to value.

    Args:
        **options: Options of the chosen task, for example ``primary``.
    """

    def __init__(self, **options: Any):
        self.options = options

    def for_targets(self, kind: str) -> Task:
        """Return the task of a kind of targets, created with the given options.

        Args:
            kind: The kind of targets, such as "classification" (``Arrays.task``).

        Raises:
            ConfigError: The task does not have one of the options.
        """
        task_class = task_for(kind)
        try:
            return task_class(**self.options)
        except TypeError as error:
            options = ", ".join(f"task.{name}" for name in self.options)
            reason = str(error).replace(f"{task_class.__name__}.__init__()", "its class")
            raise ConfigError(
                f"{options}: the targets of the data set select task={kind}, and {reason}; set only options that "
                f"conf/task/{kind}.yaml lists"
            ) from error
