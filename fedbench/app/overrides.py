"""Overrides: what is wrong with a single one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from fedbench.config.conf_tree import GROUPS, group_options, menu, nearest
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import show


def check_key(override: Override) -> None:
    """Refuse a word that names no key, or one that is not the user's to set."""
    key, text = override.key_or_group, override.input_line
    require(key != "", f"{text!r} names no key: write key=value, as in seed=3")
    require(key != "hydra", f"{text} would replace all of Hydra's keys: write one of them, as in hydra.run.dir=folder")
    require(
        key.split(".")[0] != "choices",
        f"{text}: choices is what a run notes of its groups; choose an option by "
        "the name of the group, as in algorithm=fedavg",
    )
    if "/" in key and not override.is_delete() and not override.is_sweep_override():
        require(
            isinstance(override.value(), str | list),
            f"{text}: {key} is chosen by the name of an option, got {show(override.value())}",
        )


def check_swept(override: Override) -> None:
    """Refuse a sweep over nothing."""
    if not override.is_sweep_override() or override.is_interval_sweep():
        return
    try:
        some = any(True for _ in override.sweep_iterator())
    except ValueError as error:  # range(0,9,0)
        raise ConfigError(f"{override.input_line} cannot be counted out: {error}") from error
    require(
        some,
        f"{override.input_line} is no value at all: give {override.key_or_group} one or more "
        f"({override.key_or_group}=range(0,3) is 0, 1, 2)",
    )


def check_choice(override: Override, folders: list[Path]) -> None:
    """Refuse an unknown option of a group, and a plus where there must be none (or the reverse)."""
    group = override.key_or_group
    if group not in GROUPS or override.is_delete():
        return
    options, plus = group_options(group, folders), "+" if group == "experiment" else ""
    values = _values(override)
    require(
        bool(plus) or group == "callbacks" or not any(isinstance(value, list) for value in values),
        f"{override.input_line} is a list, and a run takes one option "
        f"of {group}; to run each of several: -m {group}=a,b",
    )
    for value in itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in values):
        if value in options:
            continue
        hint = nearest(str(value), options, f"{plus}{group}=")
        shown = value if isinstance(value, str) else show(value)
        same = [name for name in options if name.startswith(f"{str(value).split('/')[0]}/")]
        listed = ", ".join(same or menu(options)) or "none"
        own = "" if hint or len(folders) > 1 else "; an option of your own needs --config-dir"
        raise ConfigError(f"{group}={shown} is not an option:{hint} {group} has {listed}{own}")
    why = "an experiment is added to the default run" if plus else "the plus is for +experiment only"
    written = bool(plus) == (override.type is not OverrideType.CHANGE)
    require(written, f"write {plus}{str(override.input_line).lstrip('+')}: {why}")


def unreadable(text: str, folders: list[Path]) -> str:
    """Return why a word on the command line is no override; the name of an option alone is recognized."""
    if "=" not in text:
        owners = [group for group in GROUPS for name in group_options(group, folders) if name == text]
        meant = " or ".join(f"{'+' if group == 'experiment' else ''}{group}={text}" for group in owners)
        return f"{text!r} is not of the form key=value" + (f": did you mean {meant}?" if meant else "")
    key, value = text.split("=", 1)
    return f"cannot read {text!r}: put quotes around an unusual value, as in '{key}=\"{value}\"'"


def leaves(override: Override) -> list[str]:
    """Return the dotted keys that an override sets; none where it deletes."""
    if override.is_delete():
        return []
    key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
    value = None if override.is_sweep_override() else override.value()
    return list(flatten({key: value}))


def _values(override: Override) -> list[Any]:
    """Return the values of an override, several in a sweep."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    return [override.value()]
