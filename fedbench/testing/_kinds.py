"""The kinds of things that can be checked, and how a kind is told from the class: one entry for each."""

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
from fedbench.testing._suite import Report, Suite
from fedbench.testing.adapter import SUITE as ADAPTER
from fedbench.testing.adapter import check_adapter
from fedbench.testing.algorithm import SUITE as ALGORITHM
from fedbench.testing.algorithm import check_algorithm
from fedbench.testing.callback import SUITE as CALLBACK
from fedbench.testing.callback import check_callback
from fedbench.testing.compression import SUITE as COMPRESSION
from fedbench.testing.compression import check_compression
from fedbench.testing.model import SUITE as MODEL
from fedbench.testing.model import check_model
from fedbench.testing.partition import SUITE as PARTITION
from fedbench.testing.partition import check_partition
from fedbench.testing.task import SUITE as TASK
from fedbench.testing.task import check_task


@dataclass(frozen=True)
class Kind:
    """check: check_algorithm or its like; fits: whether an imported object is of the kind.  The kind's name is that of
    its group of conf."""

    suite: Suite[Any]
    check: Callable[..., Report]
    fits: Callable[[Any], bool]
    words: str


def _is_subclass(base: type) -> Callable[[Any], bool]:
    return lambda found: inspect.isclass(found) and issubclass(found, base)


KINDS = {
    "algorithm": Kind(ALGORITHM, check_algorithm, _is_subclass(Algorithm), "a subclass of Algorithm"),
    "model": Kind(MODEL, check_model, _is_subclass(nn.Module), "a torch.nn.Module"),
    "adapter": Kind(ADAPTER, check_adapter, _is_subclass(Adapter), "a subclass of fedbench.adapters.base.Adapter"),
    "task": Kind(TASK, check_task, _is_subclass(Task), "a subclass of Task"),
    "compression": Kind(
        COMPRESSION, check_compression, _is_subclass(Compressor), "a subclass of fedbench.compression.base.Compressor"
    ),
    "callbacks": Kind(
        CALLBACK, check_callback, _is_subclass(Callback), "a subclass of fedbench.simulation.callbacks.base.Callback"
    ),
    "partition": Kind(
        PARTITION,
        check_partition,
        lambda found: inspect.isclass(found) and callable(getattr(found, "assign", None)),
        "a class with assign(...)",
    ),
}


def kind_of(target: str) -> tuple[str, str]:
    """The kind of a target, and its path or name: ``my_package.MyMethod``, or ``algorithm=pgfed`` of conf.

    ConfigError where it cannot be told.
    """
    group, equals, name = target.partition("=")
    if equals:
        if group not in KINDS:
            raise ConfigError(f"{target}: {group} is none of {', '.join(KINDS)}")
        if "." not in name and name not in group_options(group):
            raise ConfigError(f"{target}: conf/{group} has {', '.join(group_options(group))}")
        return group, name
    if "." not in target:
        owners = [kind for kind in KINDS if target in group_options(kind)]
        meant = f": did you mean {' or '.join(f'{owner}={target}' for owner in owners)}?" if owners else ""
        raise ConfigError(f"{target} is no dotted path of a class, such as my_package.MyMethod{meant}")
    found = find_target(target, "check")
    kinds = [kind for kind, k in KINDS.items() if k.fits(found)]
    if not kinds:
        said = "; ".join(f"{kind}={target} for {k.words}" for kind, k in KINDS.items())
        raise ConfigError(f"{target} is of no kind that can be checked; say which, as in {said}")
    return kinds[0], target
