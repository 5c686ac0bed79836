"""Resolve the target of a check: a class, its dotted path, or an option of a group (a folder of conf, as model)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from fedbench.config.conf_tree import find_conf_dir, group_options
from fedbench.core.options import require
from fedbench.simulation.instantiate import make

Target = str | type


def path_of(target: Target) -> str:
    """Return the dotted path of a class.  A text, which is a path or an option already, is returned unchanged.

    Raises:
        ConfigError: The class is defined inside a function.
    """
    if isinstance(target, str):
        return target
    path = f"{target.__module__}.{target.__qualname__}"
    require(
        "<locals>" not in path,
        f"{path} is defined inside a function, so it cannot be imported: define it at the top level of a module",
    )
    return path


def described(
    group: str, target: Target, options: Mapping[str, Any] | None, base: type | None = None
) -> dict[str, Any]:
    """Return the path of a class under `_target_`, and its options, as the YAML files in conf have them.

    Args:
        group: The group of conf, such as "model".
        target: The class, its dotted path, or an option of the group.
        options: Arguments of its constructor, which replace those of the option.
        base: The required base class; None to build no object and accept every class.

    Raises:
        ConfigError: The object cannot be built, or is not an instance of the base class.
    """
    name, values = path_of(target), dict(options or {})
    if name in group_options(group):
        text = (find_conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
        values = {**entry_of(group, yaml.safe_load(text)), **values}
    else:
        values = {"_target_": name, **values}
    if base is not None:
        expected = f"{base.__module__}.{base.__qualname__}"
        require(
            isinstance(make(values, key=group), base),
            f"{name} is not a subclass of {expected}: derive it from this class, or check it as another kind",
        )
    return values


def entry_of(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return that part of the content of a YAML file in conf that has the key `_target_`.

    In a file of conf/callbacks, they are below the name of the callback; in other groups, they are all values.

    Args:
        group: The group of conf, such as "model".
        values: The content of the YAML.

    Raises:
        ConfigError: The file does not define exactly one callback.
    """
    if group != "callbacks":
        return values
    require(
        len(values) == 1,
        f"the option defines {len(values)} callbacks, but only one can be checked at a time: name the class of one",
    )
    return next(iter(values.values()))
