"""Rows of runs.csv that differ in their seed only, as one: mean and spread of what they have under a key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedbench.core.options import listed, require
from fedbench.pages.store import Page, Row
from fedbench.report.summary import over_seeds
from fedbench.report.table import Spread

SHOWN = ("finished", "stopped")  # stopped on purpose after the rounds that runs.csv says


@dataclass
class Group:
    """Runs of one part with the same labels; either a row each, or one row for what is left of several."""

    labels: dict[str, Any]
    rows: list[Row]

    @property
    def n(self) -> int:
        """How many runs there are, or were."""
        return sum(row["n"] for row in self.rows)

    @property
    def tuned(self) -> bool:
        """Whether the method fine-tunes what clients deploy, after the last round only."""
        return any(row.get("tuned_at_end") for row in self.rows)

    def value(self, key: str, over: str | None = None) -> Any:
        """What the runs have under a key: a Spread over seeds of numbers, the text that all have, or None.

        over: the key of another spread (over clients), whose mean over seeds is the Spread's std.
        """
        if key == "n":
            return self.n
        values = [row.get(key) for row in self.rows]
        if any(isinstance(value, str) for value in values):
            return values[0] if len(set(values)) == 1 else ", ".join(str(value) for value in values)
        if len(self.rows) == 1 and self.n != 1:
            row = self.rows[0]
            count = row.get(f"{key}_n")
            mean = float("nan") if values[0] is None else float(values[0])
            known = 0 if values[0] is None else self.n if count is None else count
            return Spread(mean, row.get(over or f"{key}_std"), known, self.n)
        spread = over_seeds(values)
        if over is None:
            return spread
        return Spread(spread.mean, over_seeds(row.get(over) for row in self.rows).mean, spread.count, spread.of)


def groups_of(page: Page, part: str, where: Mapping[str, Any] | None = None) -> list[Group]:
    """The runs of a part that ended as they should, by their labels, in the order of runs.csv; ``where`` picks some.

    ConfigError where the part is not there, or where a summary of several runs stands beside other rows of its group.
    """
    require(part in page.parts, f"{page.folder}: runs.csv has no part {part!r}; there are {listed(page.parts)}")
    found: dict[Any, Group] = {}
    labels = page.labels(part)
    for row in page.runs:
        if row["part"] == part and row["status"] in SHOWN and is_chosen(row, where or {}):
            key = tuple(row.get(name) for name in labels)
            found.setdefault(key, Group({name: row.get(name) for name in labels}, [])).rows.append(row)
    for group in found.values():
        require(
            len(group.rows) == 1 or all(row["n"] == 1 for row in group.rows),
            f"{page.folder}: runs.csv has a summary of several runs beside other rows of {group.labels}",
        )
    return list(found.values())


def alone(group: Group) -> list[Group]:
    """Each run of a group as a group of its own, by seed."""
    rows = sorted(group.rows, key=lambda row: (str(type(row["seed"])), row["seed"]))
    return [Group(group.labels, [row]) for row in rows]


def one_group(page: Page, part: str | None, names: Iterable[Any], where: Mapping[str, Any]) -> Group:
    """The one group of a part (the first, unless one is given) that has the labels ``names`` and what ``where`` says.

    ConfigError where that is none, or several.
    """
    part = page.parts[0] if part is None else part
    found = [g for g in groups_of(page, part, where) if all(_is_label(g, name) for name in names)]
    words = ", ".join([*map(str, names), *(f"{key}={value}" for key, value in where.items())])
    known = listed([" ".join(str(v) for v in group.labels.values()) for group in found or groups_of(page, part)], 40)
    require(len(found) == 1, f"{page.folder}: {len(found)} groups of part {part} are {words}; there are {known}")
    return found[0]


def _is_label(group: Group, name: Any) -> bool:
    return any(_equal(value, name) for value in group.labels.values())


def is_chosen(row: Row, where: Mapping[str, Any]) -> bool:
    """Whether a row has these values; a key may be named by its last part, ``shots`` for partition.shots."""
    return all(_equal(row.get(full_name(row, key)), value) for key, value in where.items())


def full_name(row: Row, key: str) -> str:
    """The column that a key means; ConfigError for none or several."""
    if key in row:
        return key
    found = [name for name in row if name.rpartition(".")[2] == key]
    require(len(found) == 1, f"no column is named {key}; there are {listed(row, 30)}")
    return found[0]


def _equal(found: Any, wanted: Any) -> bool:
    return any(
        found == value or str(found) == str(value) for value in (wanted if isinstance(wanted, list) else [wanted])
    )
