"""What is to be checked: a class, the dotted path of one, or an option of a group of conf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from fedbench.config.conf_tree import find_conf_dir, group_options
from fedbench.core.options import require

Target = str | type


def path_of(target: Target) -> str:
    """The dotted path of a class (or the name of an option, as it is); ConfigError for one inside a function."""
    if isinstance(target, str):
        return target
    path = f"{target.__module__}.{target.__qualname__}"
    require("<locals>" not in path, f"{path} stands inside a function: define it at the top of a module")
    return path


def described(group: str, target: Target, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """``_target_`` and options: of a class, or those that an option of the group has, with these on top."""
    name, given = path_of(target), dict(options or {})
    if name not in group_options(group):
        return {"_target_": name, **given}
    text = (find_conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
    return {**entry_of(group, yaml.safe_load(text)), **given}


def entry_of(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an option with its class; a file of conf/callbacks has them below the callback's name.

    Raises:
        ConfigError: The file names no callback, or several.
    """
    if group != "callbacks":
        return values
    require(len(values) == 1, f"the option names {len(values)} callbacks; one can be checked at a time")
    return next(iter(values.values()))
