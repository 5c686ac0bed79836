"""The kinds of classes that can be checked, and the kind of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedbench.adapters.base import Adapter
from fedbench.algorithms.base import Algorithm
from fedbench.compression.base import Compressor
from fedbench.config.conf_tree import group_options
from fedbench.config.find_target import find_target
from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.base import Callback
from fedbench.tasks.base import Task
from fedbench.testing import adapter, algorithm, callback, compression, model, partition, task
from fedbench.testing._suite import Report, Suite


@dataclass(frozen=True)
class Kind:
    """A kind of classes, with the name of its group of conf.

    Args:
        suite: The checks.
        check: The function that runs them.
        includes: Return whether an imported object is a class of this kind.
        description: What a class of this kind is.
    """

    suite: Suite[Any]
    check: Callable[..., Report]
    includes: Callable[[Any], bool]
    description: str


def _subclass_of(base: type) -> Callable[[Any], bool]:
    return lambda found: inspect.isclass(found) and issubclass(found, base)


def _has_assign(found: Any) -> bool:
    return inspect.isclass(found) and callable(getattr(found, "assign", None))


KINDS = {
    "algorithm": Kind(
        algorithm.SUITE, algorithm.check_algorithm, _subclass_of(Algorithm), "a subclass of algorithms.base.Algorithm"
    ),
    "model": Kind(model.SUITE, model.check_model, _subclass_of(nn.Module), "a subclass of torch.nn.Module"),
    "adapter": Kind(adapter.SUITE, adapter.check_adapter, _subclass_of(Adapter), "a subclass of adapters.base.Adapter"),
    "task": Kind(task.SUITE, task.check_task, _subclass_of(Task), "a subclass of tasks.base.Task"),
    "compression": Kind(
        compression.SUITE,
        compression.check_compression,
        _subclass_of(Compressor),
        "a subclass of compression.base.Compressor",
    ),
    "callbacks": Kind(
        callback.SUITE,
        callback.check_callback,
        _subclass_of(Callback),
        "a subclass of simulation.callbacks.base.Callback",
    ),
    "partition": Kind(partition.SUITE, partition.check_partition, _has_assign, "a class with a method assign(...)"),
}


def kind_of(target: str) -> tuple[str, str]:
    """Return the kind of a target, and its path or option.

    Args:
        target: A dotted path, such as ``my_package.MyMethod``, or an option, such as ``algorithm=pgfed``.

    Raises:
        ConfigError: The target does not exist, or belongs to none of the kinds.
    """
    group, equals, name = target.partition("=")
    if equals:
        if group not in KINDS:
            raise ConfigError(f"{target}: {group} cannot be checked, choose from {', '.join(KINDS)}")
        if "." not in name and name not in group_options(group):
            raise ConfigError(f"{target}: conf/{group} has {', '.join(group_options(group))}")
        return group, name
    if "." not in target:
        groups = [kind for kind in KINDS if target in group_options(kind)]
        hint = f": did you mean {' or '.join(f'{group}={target}' for group in groups)}?" if groups else ""
        raise ConfigError(f"{target} is not the dotted path of a class, such as my_package.MyMethod{hint}")
    found = find_target(target, "check")
    kinds = [name for name, kind in KINDS.items() if kind.includes(found)]
    if not kinds:
        choices = "; ".join(f"{name}={target} for {kind.description}" for name, kind in KINDS.items())
        raise ConfigError(f"{target} belongs to none of the kinds that can be checked; name the kind, as in {choices}")
    return kinds[0], target
