"""A page of results: the data files of its folder as DataFrames, and groups of runs that differ only in the seed.

page.json   title, printed tables, metric, commands, figures, pictures (docs/pages.md)
runs.csv    a row per run; or a row that summarizes several runs: the mean of a score under its key, the standard
            deviation under key_std, the number of values under key_n, and the number of runs under n
curves.csv  a row per run and round: recorded metrics, as means over clients, and cumulative communication
cells.csv   a row per cell of a printed table: its form, and our value if it was run
gains.csv   a row per method and client: the gain over Local, as a mean over seeds, with its spread
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.files import replace_text
from fedbench.core.options import ConfigError, listed, require
from fedbench.report.display import METHOD_KEYS, method_name
from fedbench.report.summary import over_seeds
from fedbench.report.table import DAGGER, Spread

FORMS = ("full", "reduced", "not run")  # in the setting of the paper or experiment, in a reduced one, or not at all
COMPLETE = ("finished", "stopped")  # status of runs that are shown; others stopped by an error
TABLES = ("runs", "curves", "cells", "gains")
DEFAULTS = {
    "title": "", "summary": "", "papers": [], "migrated": "", "metric": "personal/accuracy", "percent": True,
    "select": "last", "target": 0.7, "group": None, "labels": {}, "commands": {}, "cells": {}, "figures": {},
    "pictures": {}, "files": [],
}  # fmt: skip


@dataclass
class Page:
    """The data of a page: page.json as the dict ``about``; runs.csv, curves.csv, cells.csv, gains.csv as DataFrames.

    Attributes:
        folder: The folder.
        about: The content of page.json, with all keys of `DEFAULTS`.
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
        """The name of the page, which is that of its folder."""
        return self.folder.resolve().name

    @property
    def parts(self) -> list[str]:
        """The distinct values of the column part of runs.csv, in their order.  Each part has its own tables."""
        return list(self.runs["part"].unique()) if len(self.runs) else []

    @property
    def scale(self) -> int:
        """The factor by which scores are displayed: 100 if page.json says that they are in percent, else 1."""
        return 100 if self.about["percent"] else 1

    def labels(self, part: str) -> list[str]:
        """Return the columns of runs.csv by which the runs of a part are grouped; ["method"] if page.json has none."""
        return list(self.about["labels"].get(part, ["method"]))

    def part(self, name: str | None) -> str:
        """Return a part's name if the page has this part, a set of runs; for None, the name of the first part.

        Raises:
            ConfigError: There is no such part.
        """
        name = name or next(iter(self.parts), "main")  # "main" for the error message of a page without runs
        require(
            name in self.parts,
            f"{self.folder}: runs.csv has no part {name}; name one of its parts, {listed(self.parts)}",
        )
        return name

    def entry(self, key: str, name: str) -> Any:
        """Return a named entry of page.json.

        Args:
            key: A key with a mapping, such as "figures".
            name: The name in this mapping.

        Raises:
            ConfigError: There is no such entry.
        """
        entries = self.about[key]
        require(
            name in entries,
            f"{self.folder}: page.json has no {name} under {key}; add it, or name one of {listed(entries)}",
        )
        return entries[name]


@dataclass
class Group:
    """Runs of one part of a page with equal labels (method, data set ...); ``rows`` are their rows of runs.csv.

    Attributes:
        labels: The labels.
        rows: The rows of runs.csv: one per run, or one that summarizes all runs.
    """

    labels: dict[str, Any]
    rows: Any

    @property
    def n(self) -> int:
        """The number of runs in the group: the sum of the column n, because a row may summarize several runs."""
        return int(self.rows["n"].sum())

    @property
    def is_summary(self) -> bool:
        """Whether the group has one row that summarizes several runs, instead of a row per run."""
        return len(self.rows) == 1 and self.n != 1

    @property
    def tuned(self) -> bool:
        """Whether clients fine-tune their models after the last round, and do not do so in the rounds before."""
        return "tuned_at_end" in self.rows and bool(self.rows["tuned_at_end"].any())

    @property
    def name(self) -> str:
        """The name of the method in papers, with a dagger if it fine-tunes after the last round only."""
        label = next((str(self.labels[key]) for key in METHOD_KEYS if self.labels.get(key) is not None), "")
        return method_name(label) + (DAGGER if self.tuned else "")

    @property
    def seeds(self) -> dict[Any, Group]:
        """A dict from seed to the group of the rows with this seed."""
        return {seed: Group(self.labels, rows) for seed, rows in self.rows.groupby("seed")}

    def spread(self, key: str) -> Spread:
        """Return mean and standard deviation over seeds of a score.

        The standard deviation of "gain_last" is over clients, as a mean over seeds.  Without the column, the mean is
        NaN.

        Args:
            key: A column of runs.csv.
        """
        if key not in self.rows:
            return Spread(float("nan"), std=None, count=0, total=self.n)
        std_key = "gain_last_clients" if key == "gain_last" else f"{key}_std"
        if self.is_summary:  # one row with means, and perhaps the columns KEY_std and KEY_n, instead of a row per run
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

        Args:
            page: The page of the group.
            key: A column of curves.csv.
            round: The round.

        Raises:
            ConfigError: The round is not recorded.
        """
        rows = page.curves[page.curves["run"].isin(self.rows["run"]) & (page.curves["round"] == round)]
        require(
            len(rows) > 0, f"{page.folder}: curves.csv has no round {round} of {self.labels}: name a recorded round"
        )
        if self.is_summary:
            std = float_or_none(rows.iloc[0].get(f"{key}_std"))
            return Spread(float(rows.iloc[0][key]), std, self.n, self.n)
        return over_seeds(rows[key])


def float_or_none(value: Any) -> float | None:
    """Return a number as a float; None for None and NaN."""
    return None if pd.isna(value) else float(value)


def read_page(folder: Path) -> Page:
    """Read page.json and the CSV files of a page.

    Raises:
        ConfigError: A file is damaged, page.json is missing or has an unknown key, or runs.csv lacks a column.
    """
    path = folder / "page.json"
    require(path.is_file(), f"{folder} is not a page: it has no page.json (python -m fedbench pages write creates one)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        require(False, f"{path} is damaged ({error}): restore it from version control, or write the page again")
    unknown = [key for key in about if key not in DEFAULTS]
    require(
        not unknown,
        f"{path} has unknown keys {', '.join(unknown)}; there are {', '.join(DEFAULTS)}: correct or remove them",
    )
    page = Page(folder, {**DEFAULTS, **about}, *(_read_csv(folder / f"{name}.csv") for name in TABLES))
    for key in ("part", "n", "status", "form") if len(page.runs) else ():
        require(key in page.runs, f"{folder / 'runs.csv'} is damaged: it has no column {key}; write the page again")
    for key in (label for part in page.parts for label in page.labels(part)):
        require(
            key in page.runs,
            f"{folder / 'runs.csv'} has no column {key}, which page.json lists under labels: correct the label there",
        )
    # form: "full" for the setting of a paper, "reduced" for a smaller one, or "not run"
    forms = {value for frame in (page.runs, page.cells) if len(frame) for value in frame["form"]}
    require(
        forms <= set(FORMS),
        f"{folder}: the column form of runs.csv and cells.csv must be one of {', '.join(FORMS)}, got "
        f"{', '.join(sorted(map(str, forms - set(FORMS))))}; correct the file, or write the page again",
    )
    return page


def _read_csv(path: Path) -> Any:
    """Return a CSV file as a DataFrame, or an empty one if the file does not exist; ConfigError if it is damaged."""
    if not path.is_file():
        return pd.DataFrame()
    try:
        return pd.read_csv(path, keep_default_na=False, na_values=[""])  # "none" and "NA" are names of options
    except (ValueError, pd.errors.ParserError) as error:
        require(False, f"{path} is damaged ({error}): restore it from version control, or write the page again")


def write_page(page: Page) -> list[Path]:
    """Write page.json, without keys that have default values, and the CSV files that have rows.

    CSV files of tables without rows are removed.

    Returns:
        The paths of the written files.
    """
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


def groups_of(
    page: Page, part: str | None = None, where: Mapping[str, Any] | None = None, names: Sequence[Any] = ()
) -> list[Group]:
    """Return the groups of complete runs in a part of the page, in the order of runs.csv.

    The runs of a group have equal labels, such as method and data set, and differ in the seed.

    Args:
        page: The page.
        part: The part; None for the first one.
        where: Values that rows must have, by column or by the last part of its name.  A list means any of its values.
        names: Values that rows must have, each in any of the label columns, such as the name of a method.

    Raises:
        ConfigError: There is no such part or column, or a group has a summary of several runs beside other rows.
    """
    part = page.part(part)
    rows = page.runs[(page.runs["part"] == part) & page.runs["status"].isin(COMPLETE)]
    for key, expected in (where or {}).items():
        rows = rows[[_is_equal(value, expected) for value in rows[full_name(rows, key)]]]
    labels = page.labels(part)
    for name in names:
        rows = rows[rows[labels].map(lambda value, name=name: _is_equal(value, name)).any(axis=1)]
    groups = []
    for values, members in rows.groupby(labels, sort=False, dropna=False):
        is_mixed = len(members) > 1 and (members["n"] != 1).any()  # n: how many runs a row summarizes
        setting = ", ".join(map(str, values))
        require(
            not is_mixed,
            f"{page.folder}: runs.csv has a summary of several runs beside other rows of {setting}: remove one of them",
        )
        groups.append(Group({key: _label(value) for key, value in zip(labels, values)}, members))
    return groups


def _label(value: Any) -> Any:
    """Return a label from runs.csv as it was before pandas read it: 8 for 8.0, and None for NaN."""
    if pd.isna(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def one_group(page: Page, part: str | None, names: Iterable[Any], where: Mapping[str, Any]) -> Group:
    """Return the only group of runs in a part of the page that has the given values of labels.

    Args:
        page: The page.
        part: The part; None for the first one.
        names: Values that its rows must have, each in any of the label columns, such as the name of a method.
        where: Values that rows must have, by column or by the last part of its name.  A list means any of its values.

    Raises:
        ConfigError: There is none, or there are several.
    """
    names = list(names)
    matching = groups_of(page, part, where, names)
    if len(matching) == 1:
        return matching[0]
    requested = ", ".join([*map(str, names), *(f"{key}={value}" for key, value in where.items())])
    candidates = listed(
        [" ".join(map(str, group.labels.values())) for group in matching or groups_of(page, part, where)], most=40
    )
    raise ConfigError(
        f"{page.folder}: {requested or 'a call without labels'} matches {len(matching)} groups of part "
        f"{page.part(part)} instead of one; choose one of {candidates}"
    )


def full_name(frame: Any, key: str) -> str:
    """Return the column that has a name, or whose name ends with it after a point: partition.shots for shots.

    Args:
        frame: A DataFrame.
        key: The name of the column, or the last part of its name.

    Raises:
        ConfigError: There is no such column, or there are several.
    """
    columns = [key] if key in frame else [name for name in frame if name.rpartition(".")[2] == key]
    require(len(columns) == 1, f"{key} must name one column, but {len(columns)} have this name; name one of "
                             f"{listed(frame, most=30)}")  # fmt: skip
    return columns[0]


def _is_equal(value: Any, expected: Any) -> bool:
    """Return whether a label equals the expected value, or one of several.  8, 8.0 and "8" are equal.

    Args:
        value: The label.
        expected: A value, or a list of values.
    """
    options = expected if isinstance(expected, list) else [expected]
    return any(value == option or str(_label(value)) == str(option) for option in options)
