"""Convert Python values to values of a configuration, or to overrides of a sweep."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbench.config import override_text
from fedbench.config.conf_tree import GROUPS
from fedbench.core.options import ConfigError, require


def split_overrides(texts: Sequence[str]) -> list[str]:
    """Split texts at spaces into overrides.

    Args:
        texts: Texts such as "algorithm=pgfed rounds=5".

    Raises:
        ConfigError: A text cannot be parsed, or contains a flag.
    """
    overrides = [override for text in texts for override in _split(text)]
    flag = next((override for override in overrides if override.startswith("-")), None)
    require(
        flag is None,
        f"{flag} is a flag of the command line, and Python functions take overrides only: leave it out; for -m call "
        "fedbench.sweep, for --config-dir give config_dir=",
    )
    return overrides


def choices_and_values(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Separate the values of a run into chosen options of groups, such as algorithm="fedavg", and other values.

    Args:
        values: Values by key, dotted or as nested dicts: numbers, text, None, lists, dicts, classes, names of options.

    Returns:
        Overrides that choose options of groups; and the other values by dotted key.

    Raises:
        ConfigError: A value has an unsupported type.
    """
    choices, other_values = [], {}
    for key, value in _flat(values):
        # "/": a group of Hydra, such as hydra/launcher
        if key == "experiment" or "/" in key or (key in GROUPS and not inspect.isclass(value)):
            choices.append(f"{'+' if key == 'experiment' else ''}{key}={value_text(key, config_value(key, value))}")
        else:
            other_values[f"{key}._target_" if inspect.isclass(value) else key] = config_value(key, value)
    return choices, other_values


def sweep_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a sweep.

    Args:
        values: Python values by dotted key, such as "local.lr".  A list has the values of several runs.

    Raises:
        ConfigError: A value has an unsupported type, a list is empty, or it mixes classes and names of options.
    """
    return [_sweep_override(key, value) for key, value in _flat(values)]


def config_value(key: str, value: Any) -> Any:
    """Convert a Python value to a value of a configuration: a number, text, None, a list or a dict.

    Args:
        key: The key, for messages.
        value: The value.  A class is converted to its dotted path, an array or a tensor to a list.

    Raises:
        ConfigError: The value has another type.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # float64 of NumPy is a float
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [config_value(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): config_value(key, item) for name, item in value.items()}
    if inspect.isclass(value):
        return _class_path(key, value)
    if hasattr(value, "tolist"):  # a NumPy number or array, or a tensor
        return config_value(key, value.tolist())
    raise ConfigError(
        f"{key} must be a number, text, None, a list, a dict or a class, got an object of type {type(value).__name__}: "
        "convert it to one of these"
    )


def _split(text: str) -> list[str]:
    """Split a text into words as a shell does: "rounds=5 name='a b'" becomes ["rounds=5", "name=a b"].

    Raises:
        ConfigError: It is not a str, or has an open quote.
    """
    require(
        isinstance(text, str),
        f"an override must be text such as 'rounds=5', got {text!r}; give values by key, as in rounds=5",
    )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the text {text!r} cannot be split into overrides ({error}): close its quotes") from error


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in nested mappings.  An empty mapping is a value.

    Args:
        values: The nested mappings.
        within: The text before each key, such as "algorithm.".
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _sweep_override(key: str, value: Any) -> str:
    """Return the override of a sweep for a key, such as "seed=0,1".

    Classes for a group of options, such as "model", become the values of its key ``_target_``.

    Args:
        key: The dotted key.
        value: A list has the values of several runs; anything else is the value of all runs.

    Raises:
        ConfigError: The list is empty, or mixes classes and names of options.
    """
    items = list(value) if isinstance(value, list | tuple | range) else [value]
    require(len(items) > 0, f"{key}=[] has no values: give {key} at least one")
    classes = [inspect.isclass(item) for item in items]
    require(
        all(classes) or not any(classes) or key not in GROUPS,
        f"{key} mixes classes and names of options: give the class of each, such as fedbench.algorithms.fedavg.FedAvg",
    )
    # "+": config.yaml has no default experiment, so Hydra must add it
    plus, target = "+" if key == "experiment" else "", "._target_" if any(classes) and key in GROUPS else ""
    return f"{plus}{key}{target}={','.join(value_text(key, config_value(key, item)) for item in items)}"


def value_text(key: str, value: Any) -> str:
    """Return a value as Hydra parses it.

    Args:
        key: The dotted key.  For a group of options, such as "algorithm", names of options are not quoted.
        value: A value of a configuration: a number, text, None, a list or a dict.
    """
    if key in GROUPS and isinstance(value, str):
        return value
    if key in GROUPS and isinstance(value, list):
        return f"[{','.join(value_text(key, item) for item in value)}]"
    return override_text.value_text(value)


def _class_path(key: str, kind: type) -> str:
    """Return the dotted path of a class.

    Args:
        key: The key, for the message.
        kind: The class.

    Raises:
        ConfigError: The class is not defined at the top level of a module's file, so that it cannot be imported again.
    """
    path = f"{kind.__module__}.{kind.__qualname__}"
    require(
        kind.__module__ != "__main__" and "<" not in path,  # "<locals>": defined in a function
        f"{key}={kind.__name__}: the class must be in a file, so that a run can be resumed: write it into a module "
        f"(%%writefile my_module.py), and import it from there",
    )
    return path
