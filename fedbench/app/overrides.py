"""Check single overrides, with one-sentence error messages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from fedbench.config.conf_tree import GROUPS, group_options, group_overview, nearest
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import show


def check_key(override: Override) -> None:
    """Check that an override names a key that users may set.

    Raises:
        ConfigError: It has no key, or a key that cannot be set.
    """
    key, text = override.key_or_group, override.input_line
    example = "~key, as in ~local.steps" if text.startswith("~") else "key=value, as in seed=3"
    require(key != "", f"{text!r} has no key: write {example}")
    require(key != "hydra", f"{text} would replace all keys of Hydra: set a single one, as in hydra.run.dir=folder")
    require(
        key.split(".")[0] != "choices",
        f"{text}: choices is a record of the chosen options and cannot be set; choose an option by its group, as in "
        "algorithm=fedavg",
    )
    # a slash is only in keys of groups, such as hydra/launcher
    if "/" in key and not override.is_delete() and not override.is_sweep_override():
        require(
            isinstance(override.value(), str | list),
            f"{text}: {key} must be the name of an option, got {show(override.value())}",
        )


def check_swept(override: Override) -> None:
    """Check that a swept override has at least one value.

    Raises:
        ConfigError: It has no value, or a range with step 0.
    """
    if not override.is_sweep_override() or override.is_interval_sweep():
        return
    try:
        has_values = any(True for _ in override.sweep_iterator())
    except ValueError as error:  # range(0,9,0)
        raise ConfigError(
            f"{override.input_line} is not a valid range ({error}): write range(start,stop) or range(start,stop,step) "
            "with a step other than 0"
        ) from error
    require(
        has_values,
        f"{override.input_line} has no values: give {override.key_or_group} at least one "
        f"({override.key_or_group}=range(0,3) means 0, 1, 2)",
    )


def check_choice(override: Override, folders: list[Path]) -> None:
    """Check an override that chooses an option of a group: its name, and a plus if and only if one is needed.

    Args:
        override: The override.
        folders: The folders with configuration files.

    Raises:
        ConfigError: The option is unknown, or the plus is missing or unexpected.
    """
    group = override.key_or_group
    if group not in GROUPS or override.is_delete():
        return
    options, plus = group_options(group, folders), "+" if group == "experiment" else ""
    values = _values(override)  # several in a sweep
    # a run may have several experiments and several callbacks
    require(
        bool(plus) or group == "callbacks" or not any(isinstance(value, list) for value in values),
        f"{override.input_line} is a list, but a run has one {group}; to run several: -m {group}=a,b",
    )
    chosen = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    for value in chosen:
        if value in options:
            continue
        hint = nearest(str(value), options, f"{plus}{group}=")
        value_text = value if isinstance(value, str) else show(value)
        # options in the same folder, such as table/row for table/other
        in_same_folder = [name for name in options if name.startswith(f"{str(value).split('/')[0]}/")]
        listed = ", ".join(in_same_folder or group_overview(options)) or "none"
        # more than one folder: --config-dir was given
        advice = "" if hint or len(folders) > 1 else "; give the folder of your own options by --config-dir"
        raise ConfigError(f"{group}={value_text} is not an option:{hint} {group} has {listed}{advice}")
    override_text = str(override.input_line)
    why = "needs a plus, because it is added to the default run" if plus else "has a plus, which only +experiment needs"
    has_right_plus = bool(plus) == (override.type is not OverrideType.CHANGE)  # CHANGE: without a plus
    require(has_right_plus, f"{override_text} {why}: write {plus}{override_text.lstrip('+')}")


def unreadable(text: str, folders: list[Path]) -> str:
    """Return the error message for a text that is not a valid override.

    Args:
        text: The text.  If it is the name of an option, the message suggests the override, such as algorithm=fedavg.
        folders: The folders with configuration files.
    """
    if "=" not in text:
        owners = [group for group in GROUPS for name in group_options(group, folders) if name == text]
        meant = " or ".join(f"{'+' if group == 'experiment' else ''}{group}={text}" for group in owners)
        return f"{text!r} is not of the form key=value: " + (
            f"did you mean {meant}?" if meant else "write it as in seed=3"
        )
    key, value = text.split("=", 1)
    return f"cannot read {text!r}: close its brackets and quotes, or quote the value, as in '{key}=\"{value}\"'"


def leaves(override: Override) -> list[str]:
    """Return the dotted keys that an override sets; [] if it deletes a key.

    If its value is a mapping, they are the keys inside of it: "algorithm.mu" for ``algorithm={mu: 1}``.  A key with a
    package, Hydra's key@package=option, is returned with it.
    """
    if override.is_delete():
        return []
    key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
    value = None if override.is_sweep_override() else override.value()
    return list(flatten({key: value}))


def _values(override: Override) -> list[Any]:
    """Return all values of an override: [0.1, 1] for ``lr=0.1,1``, [0.5] for ``lr=0.5``, [] for an interval."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    return [override.value()]
