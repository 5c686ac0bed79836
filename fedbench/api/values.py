"""Python values as a configuration's: for one run as they are, for a sweep as the words of Hydra's sweeper."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbench.config import override_text
from fedbench.config.conf_tree import GROUPS
from fedbench.core.options import ConfigError, require


def split_words(texts: Sequence[str]) -> list[str]:
    """Return the words of command lines; a text may hold several, with spaces between them.

    Raises:
        ConfigError: A text cannot be read, or is a flag.
    """
    overrides = [one for text in texts for one in _split(text)]
    flag = next((one for one in overrides if one.startswith("-")), None)
    require(
        flag is None,
        f"{flag} is a flag of the command line: Python has fedbench.run, fedbench.sweep and their config_dir=",
    )
    return overrides


def choices_and_values(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Part the values of a run: options of groups as overrides, and all others by dotted key.

    Args:
        values: A key, dotted or with a dict inside, and its value: a number, text, None, a list, a dict, a class (in
            the place of an option), the name of an option.

    Raises:
        ConfigError: A value is of a type that no configuration holds.
    """
    choices, others = [], {}
    for key, value in _flat(values):
        if key == "experiment" or "/" in key or (key in GROUPS and not inspect.isclass(value)):
            choices.append(f"{'+' if key == 'experiment' else ''}{key}={word(key, plain(key, value))}")
        else:
            others[f"{key}._target_" if inspect.isclass(value) else key] = plain(key, value)
    return choices, others


def sweep_words(values: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a sweep; a list holds the values of several runs.

    Raises:
        ConfigError: As `choices_and_values`; a list is empty, or holds classes beside names of options.
    """
    return [_sweep_word(key, value) for key, value in _flat(values)]


def plain(key: str, value: Any) -> Any:
    """Return a value as a configuration holds it: numbers, text, None, lists and dicts; a class as its dotted path.

    Raises:
        ConfigError: The value is of another type.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # of NumPy's float64, too
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [plain(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(key, item) for name, item in value.items()}
    if inspect.isclass(value):
        return _path(key, value)
    if hasattr(value, "tolist"):  # a number or an array of NumPy, or a tensor
        return plain(key, value.tolist())
    raise ConfigError(
        f"{key} must be a number, text, None, a list, a dict or a class, got an object of type {type(value).__name__}"
    )


def _split(text: str) -> list[str]:
    require(
        isinstance(text, str),
        f"an override is text such as 'rounds=5', got {text!r}; a value goes with its key, rounds=5",
    )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r}: {error}") from error


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _sweep_word(key: str, value: Any) -> str:
    items = list(value) if isinstance(value, list | tuple | range) else [value]
    require(len(items) > 0, f"{key}=[] is no value at all: give {key} one or more to sweep over")
    classes = [inspect.isclass(item) for item in items]
    require(
        all(classes) or not any(classes) or key not in GROUPS,
        f"{key} lists classes beside names of options: give the class of each, such as "
        "fedbench.algorithms.fedavg.FedAvg",
    )
    plus, target = "+" if key == "experiment" else "", "._target_" if any(classes) and key in GROUPS else ""
    return f"{plus}{key}{target}={','.join(word(key, plain(key, item)) for item in items)}"


def word(key: str, value: Any) -> str:
    """Return a plain value in Hydra's grammar; the name of an option, or a list of such, as it is."""
    if key in GROUPS and isinstance(value, str):
        return value
    if key in GROUPS and isinstance(value, list):
        return f"[{','.join(word(key, item) for item in value)}]"
    return override_text.word(value)


def _path(key: str, kind: type) -> str:
    """Return the dotted path of a class, which must be in a file."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    require(
        kind.__module__ != "__main__" and "<" not in path,
        f"{key}={kind.__name__}: its options, and a resumed run, are read from a module's file: write the class into "
        f"one (%%writefile my_module.py) and give {key} what is imported from there",
    )
    return path
