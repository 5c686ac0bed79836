"""Python values as the words of a command line: ``rounds=5, local={"epochs": 2}`` is ``rounds=5 local.epochs=2``."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbench.config.conf_tree import GROUPS
from fedbench.core.options import ConfigError, require

PLAIN = re.compile(r"[A-Za-z_./][\w./:@%+-]*", re.ASCII)  # texts that Hydra's grammar reads as they stand ...
OTHER = re.compile(r"(?i)null|true|false|inf|nan|\.\d.*")  # ... unless they are no text there


def words_of(typed: Sequence[str], values: Mapping[str, Any], swept: bool = False) -> list[str]:
    """The words of the command that asks for the same.

    typed: words as on the command line, several in one text with spaces between them, as a shell takes them apart.
    values: a key, dotted or with a dict inside, and its value: a number, text, None, a list, a dict, a class (of one's
    own, in the place of an option), the name of an option.  swept: a list holds the values of several runs.
    Raises ConfigError for flags, and for values that no configuration can hold.
    """
    words = [word for text in typed for word in _split(text)]
    flag = next((word for word in words if word.startswith("-")), None)
    require(
        flag is None,
        f"{flag} is a flag of the command line: Python has fedbench.run, fedbench.sweep and their config_dir=",
    )
    return [*words, *_overrides(values, swept)]


def _split(text: str) -> list[str]:
    require(
        isinstance(text, str),
        f"an override is text such as 'rounds=5', got {text!r}; a value goes with its key, rounds=5",
    )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r}: {error}") from error


def _overrides(values: Mapping[str, Any], swept: bool, within: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = f"{within}{name}"
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, swept, f"{key}.")
        elif inspect.isclass(value):
            yield f"{key}._target_={_path(key, value)}"
        elif swept and isinstance(value, list | tuple | range):
            require(len(value) > 0, f"{key}=[] is no value at all: give {key} one or more to sweep over")
            classes = [inspect.isclass(item) for item in value]
            require(
                all(classes) or not any(classes) or key not in GROUPS,
                f"{key} lists classes beside names of options: give the class of each, such as "
                "fedbench.algorithms.fedavg.FedAvg",
            )
            key = f"{key}._target_" if any(classes) and key in GROUPS else key
            yield f"{_prefixed(key)}={','.join(_text(key, item) for item in value)}"
        else:
            yield f"{_prefixed(key)}={_text(key, value)}"


def _prefixed(key: str) -> str:
    """The key as the command line wants it: an experiment is added to the default run."""
    return f"+{key}" if key == "experiment" else key


def _text(key: str, value: Any) -> str:
    """A value in Hydra's grammar; the name of an option as it is."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(int(value) if isinstance(value, int) else float(value))  # of NumPy's float64, too
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return text if key in GROUPS else _quoted(text)
    if isinstance(value, list | tuple | range):
        return f"[{','.join(_text('', item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_quoted(str(name))}:{_text('', item)}" for name, item in value.items()) + "}"
    if inspect.isclass(value):
        return _path(key, value)
    if hasattr(value, "tolist"):  # a number or an array of NumPy, or a tensor
        return _text(key, value.tolist())
    raise ConfigError(
        f"{key} must be a number, text, None, a list, a dict or a class, got an object of type {type(value).__name__}"
    )


def _quoted(text: str) -> str:
    """Text that Hydra's grammar reads as this text, with quotes where it needs them."""
    if PLAIN.fullmatch(text) and not OTHER.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", text)
    ending = re.search(r"\\*$", escaped)
    return f"'{escaped}{ending[0] if ending else ''}'"


def _path(key: str, kind: type) -> str:
    """The dotted path of a class; it must be in a file, because its options are read from there."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    require(
        kind.__module__ != "__main__" and "<" not in path,
        f"{key}={kind.__name__}: its options, and a resumed run, are read from a module's file: write the class into "
        f"one (%%writefile my_module.py) and give {key} what is imported from there",
    )
    return path
