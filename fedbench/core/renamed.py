"""Options that were renamed.  The old names are accepted for one release, and stored runs are read by this table.

Hashes of configurations are taken over the old names, so that they stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from fedbench.core.options import ConfigError

# old dotted key -> new one.  A group's option is renamed for the classes of fedbench only.
RENAMED = {
    "weights": "client_weights",
    "compression.memory": "compression.error_feedback",
}
OLD = {new: old for old, new in RENAMED.items()}


def new_name(key: str) -> str:
    """Return the current dotted key of an option, given its present or former one.

    A key that was never renamed is returned unchanged.
    """
    return RENAMED.get(key, key)


def old_name(key: str) -> str:
    """Return the name that an option had before it was renamed, given its current dotted key.

    A key that was never renamed is returned unchanged.
    """
    return OLD.get(key, key)


def rename_options(values: MutableMapping[Any, Any]) -> list[str]:
    """Rename options in nested values, in place.

    Args:
        values: The nested values of a configuration.

    Returns:
        The old dotted keys that were found and renamed.
    """
    found = []
    for old, new in RENAMED.items():  # dotted keys
        group, _, name = old.rpartition(".")
        options = values.get(group) if group else values
        if not isinstance(options, MutableMapping) or name not in options:
            continue
        # a class of the user may have an option of the old name, with another meaning
        if not group or str(options.get("_target_")).startswith("fedbench."):
            options[new.rpartition(".")[2]] = options.pop(name)
            found.append(old)
    return found


def refuse_old_names(owner: type | object, names: Mapping[str, str]) -> None:
    """Refuse a user's class or object that defines an attribute or method by a former name, which nothing would read.

    Args:
        owner: A subclass of a base class of fedbench, or an instance.
        names: The current name of each attribute, by its former name.

    Raises:
        ConfigError: The owner itself, not its base class, has an attribute of a former name.
    """
    cls = owner if isinstance(owner, type) else type(owner)
    for old, new in names.items():
        if old in vars(owner):
            raise ConfigError(
                f"{cls.__module__}.{cls.__name__} defines {old}, which is now called {new}: rename it in your class"
            )
