"""A page of results: its folder's data files as DataFrames, and groups of runs that differ in their seed only.

page.json   title, printed tables, metric, commands, figures, pictures (docs/results.md)
runs.csv    a row per run, or per summary of several: the mean under a key, the std under key_std, their number under
            key_n, the number of runs under n
curves.csv  a row per run and round: the recorded metrics, means over clients; what was sent until then
cells.csv   a row per cell of a printed table: its form, and ours where it was run
gains.csv   a row per method and client: the gain over Local, a mean over seeds, with its spread
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
from fedbench.report.summary import over_seeds
from fedbench.report.table import DAGGER, Spread
from fedbench.report.words import METHOD, printed

FORMS = ("full", "reduced", "not run")
SHOWN = ("finished", "stopped")  # stopped on purpose, after the rounds that runs.csv says
TABLES = ("runs", "curves", "cells", "gains")
DEFAULTS = {
    "title": "", "summary": "", "papers": [], "migrated": "", "metric": "personal/accuracy", "percent": True,
    "select": "last", "target": 0.7, "group": None, "labels": {}, "commands": {}, "cells": {}, "figures": {},
    "pictures": {}, "files": [],
}  # fmt: skip


@dataclass
class Page:
    """A folder's data; ``about`` is page.json with all of its keys."""

    folder: Path
    about: dict[str, Any]
    runs: Any = field(default_factory=pd.DataFrame)
    curves: Any = field(default_factory=pd.DataFrame)
    cells: Any = field(default_factory=pd.DataFrame)
    gains: Any = field(default_factory=pd.DataFrame)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def parts(self) -> list[str]:
        """The names of the page's parts, in the order of runs.csv."""
        return list(self.runs["part"].unique()) if len(self.runs) else []

    @property
    def scale(self) -> int:
        """100 if scores are shown in percent."""
        return 100 if self.about["percent"] else 1

    def labels(self, part: str) -> list[str]:
        """Return the columns that tell the groups of a part apart."""
        return list(self.about["labels"].get(part, ["method"]))

    def part(self, name: str | None) -> str:
        """Return the name of a part, of the first one for None.

        Raises:
            ConfigError: There is no such part.
        """
        name = name or next(iter(self.parts), "main")
        require(name in self.parts, f"{self.folder}: runs.csv has no part {name}; there are {listed(self.parts)}")
        return name


@dataclass
class Group:
    """Runs of one part with equal labels: a row each, or one row that summarizes them."""

    labels: dict[str, Any]
    rows: Any

    @property
    def n(self) -> int:
        """The number of runs."""
        return int(self.rows["n"].sum())

    @property
    def tuned(self) -> bool:
        """Whether the method fine-tunes after the last round only."""
        return "tuned_at_end" in self.rows and bool(self.rows["tuned_at_end"].any())

    @property
    def name(self) -> str:
        """The method's printed name, with a dagger if it is fine-tuned after the last round only."""
        label = next((str(self.labels[key]) for key in METHOD if self.labels.get(key) is not None), "")
        return printed(label) + DAGGER * self.tuned

    @property
    def seeds(self) -> dict[Any, Group]:
        """Each run as a group, by seed."""
        return {seed: Group(self.labels, rows) for seed, rows in self.rows.groupby("seed")}

    def spread(self, key: str, over: str | None = None) -> Spread:
        """Return mean and std over seeds of a column; over: the column whose mean is the std (over clients)."""
        if key not in self.rows:
            return Spread(float("nan"), None, 0, self.n)
        if len(self.rows) == 1 and self.n != 1:  # a summary
            row = self.rows.iloc[0]
            std, count = row.get(over or f"{key}_std"), row.get(f"{key}_n")
            known = 0 if pd.isna(row[key]) else self.n if pd.isna(count) else int(count)
            return Spread(float(row[key]), None if pd.isna(std) else float(std), known, self.n)
        spread = over_seeds(_numbers(self.rows[key]))
        return spread if over is None else Spread(spread.mean, over_seeds(_numbers(self.rows[over])).mean,
                                                  spread.count, spread.of)  # fmt: skip


def _numbers(column: Any) -> list[float | None]:
    return [None if pd.isna(value) else float(value) for value in column]


def read_page(folder: Path) -> Page:
    """Return a page.

    Raises:
        ConfigError: A file is missing or damaged, or page.json has an unknown key.
    """
    path = folder / "page.json"
    require(path.is_file(), f"{folder} is no page: it has no page.json (python -m fedbench pages write makes one)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        require(False, f"{path} is damaged: {error}")
    odd = [key for key in about if key not in DEFAULTS]
    require(not odd, f"{path} has unknown keys {', '.join(odd)}; there are {', '.join(DEFAULTS)}")
    page = Page(folder, {**DEFAULTS, **about}, *(_read_csv(folder / f"{name}.csv") for name in TABLES))
    missing = {"part", "n", "status", "form"} - set(page.runs) if len(page.runs) else ()
    require(not missing, f"{folder / 'runs.csv'} is damaged: it has no column {', '.join(missing)}")
    for key in dict.fromkeys(label for part in page.parts for label in page.labels(part)):
        require(key in page.runs, f"{folder / 'runs.csv'} has no column {key}, which page.json calls a label")
    forms = set(page.runs["form"] if len(page.runs) else ()) | set(page.cells["form"] if len(page.cells) else ())
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
    """Return the groups of a part whose runs ended well and have the values of ``where``, in the order of runs.csv."""
    part = page.part(part)
    rows = page.runs[(page.runs["part"] == part) & page.runs["status"].isin(SHOWN)]
    for key, wanted in (where or {}).items():
        rows = rows[[_equal(value, wanted) for value in rows[full_name(rows, key)]]]
    labels = page.labels(part)
    found = []
    for values, members in rows.groupby(labels, sort=False, dropna=False):
        is_mixed = len(members) > 1 and (members["n"] != 1).any()
        words = ", ".join(map(str, values))
        require(not is_mixed, f"{page.folder}: runs.csv has a summary of several runs beside other rows of {words}")
        found.append(Group({key: _label(value) for key, value in zip(labels, values)}, members))
    return found


def _label(value: Any) -> Any:
    """Return a label without what a column of floats adds to it: 8 for 8.0, None for NaN."""
    if pd.isna(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def one_group(page: Page, part: str | None, names: Iterable[Any], where: Mapping[str, Any]) -> Group:
    """Return the group that has the labels ``names`` and the values of ``where``.

    Raises:
        ConfigError: There is none, or there are several.
    """
    names = list(names)
    groups = groups_of(page, part, where)
    found = [g for g in groups if all(any(_equal(v, name) for v in g.labels.values()) for name in names)]
    words = ", ".join([*map(str, names), *(f"{key}={value}" for key, value in where.items())])
    known = listed([" ".join(str(v) for v in group.labels.values()) for group in found or groups], 40)
    require(len(found) == 1, f"{page.folder}: {len(found)} groups of part {page.part(part)} are {words}; "
            f"there are {known}")  # fmt: skip
    return found[0]


def full_name(frame: Any, key: str) -> str:
    """Return the column that a key, or the last part of one, names (shots: partition.shots)."""
    found = [key] if key in frame else [name for name in frame if name.rpartition(".")[2] == key]
    require(len(found) == 1, f"no column is named {key}; there are {listed(frame, 30)}")
    return found[0]


def _equal(found: Any, wanted: Any) -> bool:
    options = wanted if isinstance(wanted, list) else [wanted]
    return any(found == value or str(_label(found)) == str(value) for value in options)


def curve_at(page: Page, group: Group, key: str, round: int) -> Spread:
    """Return a recorded metric at a round, over seeds."""
    rows = page.curves[page.curves["run"].isin(group.rows["run"]) & (page.curves["round"] == round)]
    require(len(rows) > 0, f"{page.folder}: curves.csv has no round {round} of {group.labels}")
    if len(group.rows) == 1 and group.n != 1:
        std = rows.iloc[0].get(f"{key}_std")
        return Spread(float(rows.iloc[0][key]), None if pd.isna(std) else float(std), group.n, group.n)
    return over_seeds(_numbers(rows[key]))
