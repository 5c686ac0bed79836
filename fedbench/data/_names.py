"""Names in data files (classes, clients, patients, categories): spelling checks and indices."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from decimal import Decimal

import numpy as np

from fedbench.core.options import ConfigError

log = logging.getLogger(__name__)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)  # without exponent: a name such as 1e1 is no number
SHOWN = 3  # names or groups of names in a message


def positions(values: Iterable[str], names: Sequence[str]) -> np.ndarray:
    """Return the index of each value in a list of names.

    Args:
        values: n values, all of them in `names`.
        names: Distinct names.

    Returns:
        Indices, [n] int64.
    """
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[value] for value in values], np.int64)


def check_spelling(names: Iterable[str], where: str, are_labels: bool = False) -> None:
    """Refuse numbers with two spellings, and warn of names that differ only by case or blanks.

    Args:
        names: Names in any order, with repetitions.
        where: Location of the names, for the message, as in "my.csv: the column label".
        are_labels: Whether the names are classes that dataset.classes does not list.  Labels that differ only by case
            or blanks are refused.

    Raises:
        ConfigError: Two names are one number, such as 1 and 1.0 or 7 and 007, or two labels are Yes and yes.
    """
    distinct = sorted(set(names))
    # groups of names with equal values of the function; None: the name belongs to no group
    equal = _groups(distinct, lambda name: Decimal(name) if PLAIN_NUMBER.fullmatch(name) else None)
    if equal:
        raise ConfigError(
            f"{where}: {_shown(equal)} are equal numbers, but would count as different names: "
            "spell each number in one way"
        )
    similar = _groups(distinct, lambda name: "".join(name.split()).casefold())
    if similar and are_labels:
        raise ConfigError(
            f"{where} has {_shown(similar)}, which differ only by case or blanks and would count as different classes: "
            "spell each class in one way, or list them in dataset.classes"
        )
    if similar:
        log.warning("%s has %s, which differ only by case or blanks and count as different names",
                    where, _shown(similar))  # fmt: skip


def _groups(names: list[str], key: Callable[[str], Hashable | None]) -> list[list[str]]:
    """Return the groups of two or more names with the same value of ``key(name)``, in the order of the names.

    Names for which the value is None belong to no group.
    """
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        if (shared := key(name)) is not None:
            groups.setdefault(shared, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _shown(groups: list[list[str]]) -> str:
    """Return groups of names as text for a message, such as "'1' and '1.0', '2' and '2.0' and 4 more".

    At most SHOWN groups, and SHOWN names of each, are shown.
    """
    text = ", ".join(" and ".join(map(repr, group[:SHOWN])) for group in groups[:SHOWN])
    return text + (f" and {len(groups) - SHOWN:,} more" if len(groups) > SHOWN else "")
