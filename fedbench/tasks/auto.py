"""The task that a data set's targets ask for."""

from typing import Any

from fedbench.core.options import ConfigError
from fedbench.tasks.base import Task, task_for


class Auto:
    """options: of the task that it turns out to be."""

    def __init__(self, **options: Any):
        self.options = options

    def for_targets(self, kind: str) -> Task:
        """The task of this kind, with the options; ConfigError where it takes none of that name."""
        task = task_for(kind)
        try:
            return task(**self.options)
        except TypeError as error:
            named = ", ".join(f"task.{name}" for name in self.options)
            raise ConfigError(
                f"{named}: the data set's task is {kind}, and {str(error).replace('__init__()', task.__name__)}; "
                f"conf/task/{kind}.yaml lists its options"
            ) from error
