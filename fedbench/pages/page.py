"""A page of results: the data files of its folder as DataFrames, and groups of runs that differ only in the seed.

page.json   title, printed tables, metric, commands, figures, pictures (docs/results.md)
runs.csv    a row per run; or a row that summarizes several runs: the mean of a score under its key, the standard
            deviation under key_std, the number of values under key_n, and the number of runs under n
curves.csv  a row per run and round: recorded metrics, as means over clients, and cumulative communication
cells.csv   a row per cell of a printed table: its form, and our value if it was run
gains.csv   a row per method and client: the gain over Local, as a mean over seeds, with its spread
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.files import replace_text
from fedbench.core.options import listed, require
from fedbench.report.display import METHOD_KEYS, method_name
from fedbench.report.summary import over_seeds
from fedbench.report.table import DAGGER, Spread

FORMS = ("full", "reduced", "not run")
COMPLETE = ("finished", "stopped")  # status of runs that are shown; others stopped by an error
TABLES = ("runs", "curves", "cells", "gains")
DEFAULTS = {
    "title": "", "summary": "", "papers": [], "migrated": "", "metric": "personal/accuracy", "percent": True,
    "select": "last", "target": 0.7, "group": None, "labels": {}, "commands": {}, "cells": {}, "figures": {},
    "pictures": {}, "files": [],
}  # fmt: skip


@dataclass
class Page:
    """The data of a page.

    Attributes:
        folder: The folder.
        about: The content of page.json, with all keys.
        runs: The DataFrame of runs.csv.
        curves: The DataFrame of curves.csv.
        cells: The DataFrame of cells.csv.
        gains: The DataFrame of gains.csv.
    """

    folder: Path
    about: dict[str, Any]
    runs: Any = field(default_factory=pd.DataFrame)
    curves: Any = field(default_factory=pd.DataFrame)
    cells: Any = field(default_factory=pd.DataFrame)
    gains: Any = field(default_factory=pd.DataFrame)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in the order of runs.csv."""
        return list(self.runs["part"].unique()) if len(self.runs) else []

    @property
    def scale(self) -> int:
        """100 if scores are displayed in percent, else 1."""
        return 100 if self.about["percent"] else 1

    def labels(self, part: str) -> list[str]:
        """Return the columns that distinguish the groups of a part."""
        return list(self.about["labels"].get(part, ["method"]))

    def part(self, name: str | None) -> str:
        """Return the name of a part; for None, of the first part.

        Raises:
            ConfigError: There is no such part.
        """
        name = name or next(iter(self.parts), "main")
        require(name in self.parts, f"{self.folder}: runs.csv has no part {name}; there are {listed(self.parts)}")
        return name

    def entry(self, key: str, name: str) -> Any:
        """Return a named entry of page.json, such as a figure.

        Raises:
            ConfigError: There is no such entry.
        """
        entries = self.about[key]
        require(name in entries, f"{self.folder}: page.json has no {name} in {key}; there are {listed(entries)}")
        return entries[name]


@dataclass
class Group:
    """Runs of one part with equal labels.

    Attributes:
        labels: The labels.
        rows: The rows of runs.csv: one per run, or one that summarizes all runs.
    """

    labels: dict[str, Any]
    rows: Any

    @property
    def n(self) -> int:
        """The number of runs."""
        return int(self.rows["n"].sum())

    @property
    def is_summary(self) -> bool:
        """Whether one row summarizes several runs."""
        return len(self.rows) == 1 and self.n != 1

    @property
    def tuned(self) -> bool:
        """Whether the method fine-tunes after the last round only."""
        return "tuned_at_end" in self.rows and bool(self.rows["tuned_at_end"].any())

    @property
    def name(self) -> str:
        """The name of the method in papers, with a dagger if it fine-tunes after the last round only."""
        label = next((str(self.labels[key]) for key in METHOD_KEYS if self.labels.get(key) is not None), "")
        return method_name(label) + (DAGGER if self.tuned else "")

    @property
    def seeds(self) -> dict[Any, Group]:
        """A group with the run of each seed."""
        return {seed: Group(self.labels, rows) for seed, rows in self.rows.groupby("seed")}

    def spread(self, key: str) -> Spread:
        """Return mean and standard deviation of a score.  The standard deviation of a gain is over clients."""
        if key not in self.rows:
            return Spread(float("nan"), None, 0, self.n)
        std_key = "gain_last_clients" if key == "gain_last" else f"{key}_std"
        if self.is_summary:
            row = self.rows.iloc[0]
            count = row.get(f"{key}_n")
            count = 0 if pd.isna(row[key]) else self.n if pd.isna(count) else int(count)
            return Spread(float(row[key]), float_or_none(row.get(std_key)), count, self.n)
        spread = over_seeds(self.rows[key])
        if key != "gain_last":
            return spread
        return Spread(spread.mean, over_seeds(self.rows[std_key]).mean, spread.count, spread.total)

    def curve_spread(self, page: Page, key: str, round: int) -> Spread:
        """Return mean and standard deviation over seeds of a recorded metric at a round.

        Raises:
            ConfigError: The round is not recorded.
        """
        rows = page.curves[page.curves["run"].isin(self.rows["run"]) & (page.curves["round"] == round)]
        require(len(rows) > 0, f"{page.folder}: curves.csv has no round {round} of {self.labels}")
        if self.is_summary:
            std = float_or_none(rows.iloc[0].get(f"{key}_std"))
            return Spread(float(rows.iloc[0][key]), std, self.n, self.n)
        return over_seeds(rows[key])


def float_or_none(value: Any) -> float | None:
    """Return a number as a float, and a missing value as None."""
    return None if pd.isna(value) else float(value)


def read_page(folder: Path) -> Page:
    """Return a page.

    Raises:
        ConfigError: A file is missing or damaged, or page.json has an unknown key.
    """
    path = folder / "page.json"
    require(path.is_file(), f"{folder} is not a page: it has no page.json (python -m fedbench pages write creates one)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        require(False, f"{path} is damaged: {error}")
    unknown = [key for key in about if key not in DEFAULTS]
    require(not unknown, f"{path} has unknown keys {', '.join(unknown)}; there are {', '.join(DEFAULTS)}")
    page = Page(folder, {**DEFAULTS, **about}, *(_read_csv(folder / f"{name}.csv") for name in TABLES))
    for key in ("part", "n", "status", "form") if len(page.runs) else ():
        require(key in page.runs, f"{folder / 'runs.csv'} is damaged: it has no column {key}")
    for key in (label for part in page.parts for label in page.labels(part)):
        require(key in page.runs, f"{folder / 'runs.csv'} has no column {key}, which page.json lists in labels")
    forms = {value for frame in (page.runs, page.cells) if len(frame) for value in frame["form"]}
    require(forms <= set(FORMS), f"{folder}: a form is one of {', '.join(FORMS)}, got {', '.join(map(str, forms))}")
    return page


def _read_csv(path: Path) -> Any:
    if not path.is_file():
        return pd.DataFrame()
    try:
        return pd.read_csv(path, keep_default_na=False, na_values=[""])
    except (ValueError, pd.errors.ParserError) as error:
        require(False, f"{path} is damaged: {error}")


def write_page(page: Page) -> list[Path]:
    """Write page.json and the CSV files that have rows, remove the others, and return the written paths."""
    page.folder.mkdir(parents=True, exist_ok=True)
    about = {key: value for key, value in page.about.items() if value != DEFAULTS[key]}
    written = [page.folder / "page.json"]
    replace_text(written[0], [json.dumps(about, ensure_ascii=False, indent=2) + "\n"])
    for name in TABLES:
        frame, path = getattr(page, name), page.folder / f"{name}.csv"
        if len(frame):
            replace_text(path, [frame.convert_dtypes().to_csv(index=False, lineterminator="\n")])
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def groups_of(page: Page, part: str | None = None, where: Mapping[str, Any] | None = None) -> list[Group]:
    """Return the groups of complete runs, in the order of runs.csv.

    Args:
        page: The page.
        part: The part; None for the first one.
        where: Values that rows must have, by column or by the last part of its name.  A list means any of its values.
    """
    part = page.part(part)
    rows = page.runs[(page.runs["part"] == part) & page.runs["status"].isin(COMPLETE)]
    for key, expected in (where or {}).items():
        rows = rows[[_is_equal(value, expected) for value in rows[full_name(rows, key)]]]
    labels = page.labels(part)
    groups = []
    for values, members in rows.groupby(labels, sort=False, dropna=False):
        is_mixed = len(members) > 1 and (members["n"] != 1).any()
        setting = ", ".join(map(str, values))
        require(not is_mixed, f"{page.folder}: runs.csv has a summary of several runs beside other rows of {setting}")
        groups.append(Group({key: _label(value) for key, value in zip(labels, values)}, members))
    return groups


def _label(value: Any) -> Any:
    """Return a label as it was written: 8 for 8.0, None for NaN, which a column of floats contains."""
    if pd.isna(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def one_group(page: Page, part: str | None, names: Iterable[Any], where: Mapping[str, Any]) -> Group:
    """Return the only group with some labels.

    Args:
        page: The page.
        part: The part; None for the first one.
        names: Values of any of its labels.
        where: Values that rows must have, see `groups_of`.

    Raises:
        ConfigError: There is none, or there are several.
    """
    names = list(names)
    groups = groups_of(page, part, where)
    found = [g for g in groups if all(any(_is_equal(v, name) for v in g.labels.values()) for name in names)]
    requested = ", ".join([*map(str, names), *(f"{key}={value}" for key, value in where.items())])
    candidates = listed([" ".join(map(str, group.labels.values())) for group in found or groups], 40)
    require(
        len(found) == 1,
        f"{page.folder}: {len(found)} groups of part {page.part(part)} are {requested}; there are {candidates}",
    )
    return found[0]


def full_name(frame: Any, key: str) -> str:
    """Return the column that a key or its last part names, such as partition.shots for shots."""
    found = [key] if key in frame else [name for name in frame if name.rpartition(".")[2] == key]
    require(len(found) == 1, f"{len(found)} columns are named {key}; there are {listed(frame, 30)}")
    return found[0]


def _is_equal(value: Any, expected: Any) -> bool:
    options = expected if isinstance(expected, list) else [expected]
    return any(value == option or str(_label(value)) == str(option) for option in options)
