"""The kinds of classes that can be checked, and the kind of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from fedbench.adapters.base import Adapter
from fedbench.aggregators.base import Aggregator
from fedbench.algorithms.base import Algorithm
from fedbench.compression.base import Compressor
from fedbench.config.conf_tree import group_options
from fedbench.config.find_target import find_target
from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.base import Callback
from fedbench.tasks.base import Task
from fedbench.testing import adapter, aggregator, algorithm, callback, compression, model, partition, task
from fedbench.testing._suite import Report, Suite


class Kind(NamedTuple):
    """A kind of classes that can be checked.

    Attributes:
        suite: The checks.
        check: The function that runs them, such as `check_algorithm`.
        base: The base class of the kind, or a protocol.
    """

    suite: Suite[Any]
    check: Callable[..., Report]
    base: type

    def includes(self, found: Any) -> bool:
        """Return whether an object is a class, and a subclass of `base`.  If `base` is a protocol: has its methods."""
        return inspect.isclass(found) and issubclass(found, self.base)


@runtime_checkable
class Partition(Protocol):
    """A class with a method assign(...), whatever its arguments; partitions have no common base class."""

    def assign(self) -> Any:
        """Return the sample indices of each client.  `fedbench.partition.base` describes arguments and result."""


KINDS = {
    "algorithm": Kind(algorithm.SUITE, algorithm.check_algorithm, Algorithm),
    "model": Kind(model.SUITE, model.check_model, nn.Module),
    "adapter": Kind(adapter.SUITE, adapter.check_adapter, Adapter),
    "task": Kind(task.SUITE, task.check_task, Task),
    "compression": Kind(compression.SUITE, compression.check_compression, Compressor),
    "aggregator": Kind(aggregator.SUITE, aggregator.check_aggregator, Aggregator),
    "callbacks": Kind(callback.SUITE, callback.check_callback, Callback),
    "partition": Kind(partition.SUITE, partition.check_partition, Partition),
}


def kind_of(target: str) -> tuple[str, str]:
    """Return the kind of a target, a key of `KINDS`, and its dotted path or option.

    Args:
        target: A dotted path, such as ``my_package.MyMethod``; or a kind with a path or an option, such as
            ``algorithm=pgfed``.

    Raises:
        ConfigError: The target does not exist, or belongs to none of the kinds.
    """
    group, equals, name = target.partition("=")
    if equals:
        if group not in KINDS:
            raise ConfigError(
                f"{target}: there are no checks for the kind {group}: name a target of the kind {', '.join(KINDS)}"
            )
        if "." not in name and name not in group_options(group):
            raise ConfigError(
                f"{target}: there is no option {name} in conf/{group}: choose from {', '.join(group_options(group))}"
            )
        return group, name
    if "." not in target:  # a single word: options of that name are suggested
        groups = [kind for kind in KINDS if target in group_options(kind)]
        hint = f"; did you mean {' or '.join(f'{group}={target}' for group in groups)}?" if groups else ""
        raise ConfigError(
            f"{target} is not the dotted path of a class: write package and class, such as my_package.MyMethod{hint}"
        )
    found = find_target(target, key="check")  # key: how messages name the target
    kinds = [name for name, kind in KINDS.items() if kind.includes(found)]
    if not kinds:
        bases = ", ".join(kind.base.__name__ for kind in KINDS.values())
        raise ConfigError(
            f"{target} is of no kind that can be checked (subclasses of {bases}): derive it from one of these classes, "
            f"or write its kind before it, as in model={target}"
        )
    return kinds[0], target
