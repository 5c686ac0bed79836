"""Build objects from the `_target_`s of a checked configuration, and check their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fedbench.adapters.base import Adapter
from fedbench.aggregators.base import Aggregator
from fedbench.algorithms.base import Algorithm
from fedbench.attacks.base import Attack
from fedbench.compression.base import Compressor
from fedbench.config.find_target import find_target
from fedbench.core.error_text import describe_error
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import with_home
from fedbench.data._stored_digest import DATASET_KEYS
from fedbench.engine.optim import Optimizer
from fedbench.server.base import ServerRule

# group: (keys that are not passed to the constructor, description of the expected object, test for it)
KINDS = {
    "dataset": (DATASET_KEYS, "a data source, which has load()", lambda x: callable(getattr(x, "load", None))),
    "task": ((), "a fedbench.tasks.base.Task", lambda x: callable(getattr(x, "for_targets", None))),
    "partition": (
        ("num_clients", "seed"),
        "a partition, which has assign(...)",
        lambda x: callable(getattr(x, "assign", None)),
    ),
    "adapter": ((), "a fedbench.adapters.base.Adapter", lambda x: isinstance(x, Adapter)),
    "optimizer": ((), "a fedbench.engine.optim.Optimizer", lambda x: isinstance(x, Optimizer)),
    "algorithm": ((), "a fedbench.algorithms.base.Algorithm", lambda x: isinstance(x, Algorithm)),
    "server": ((), "a fedbench.server.base.ServerRule", lambda x: isinstance(x, ServerRule)),
    "aggregator": ((), "a fedbench.aggregators.base.Aggregator", lambda x: isinstance(x, Aggregator)),
    "attack": ((), "a fedbench.attacks.base.Attack", lambda x: isinstance(x, Attack)),
    "compression": ((), "a fedbench.compression.base.Compressor", lambda x: isinstance(x, Compressor)),
}


def make(group: DictConfig | Mapping, reserved: tuple[str, ...] = (), *, key: str = "", **extra: Any) -> Any:
    """Call the target of a group with its keys and extra arguments.

    Args:
        group: The group's node: `_target_` and its arguments.
        reserved: Keys that are not passed to the target.
        key: The name of the group, for error messages.
        **extra: Further arguments of the target.

    Returns:
        The object.

    Raises:
        ConfigError: The target raised an exception.
    """
    values: Any = plain_values(group)
    options = {k: v for k, v in values.items() if k not in reserved}
    try:
        # Hydra passes dicts and lists instead of its own types, and does not build nested `_target_`s
        return instantiate({"_convert_": "all", "_recursive_": False, **options}, **extra)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        name = f"{key}._target_" if key else "_target_"
        raise ConfigError(
            f"{name}={values['_target_']} cannot be built: {describe_error(cause)}; correct its options, or the class"
        ) from cause


def component(cfg: DictConfig, group: str) -> Any:
    """Build the object of a group, such as the optimizer, and check its type.

    Args:
        cfg: The checked configuration.
        group: The name of the group, a key of KINDS.

    Returns:
        The object.

    Raises:
        ConfigError: The object cannot be built or has another type.
    """
    # options that the class does not get, the expected kind in words, and whether an object is of this kind
    reserved, expected, fits = KINDS[group]
    built = make(cfg[group], reserved, key=group)
    require(
        fits(built),
        f"{group}._target_={cfg[group]._target_} makes an object of type {type(built).__name__}, expected {expected}: "
        f"name another class, or choose an option by {group}=...",
    )
    return built


def target_of(cfg: DictConfig, group: str) -> Any:
    """Return the class or function whose dotted path is the option GROUP._target_, for a group such as "model".

    Raises:
        ConfigError: It cannot be imported.
    """
    return find_target(cfg[group]._target_, f"{group}._target_")


def plain_values(value: Any) -> Any:
    """Return a node of a configuration as dicts and lists, with ``~/`` expanded in paths; other values unchanged."""
    return with_home(OmegaConf.to_container(value, resolve=True)) if OmegaConf.is_config(value) else value
