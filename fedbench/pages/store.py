"""A page's files: page.json says what is shown, CSV files hold every number, page.md the words.

page.json   title, printed tables, metric, commands by part, tables, figures, pictures of before (docs/results.md)
runs.csv    a row a run, or what is left of several: their number in n, the mean under a key, the population
            standard deviation under key_std, how many had a value under key_n
curves.csv  a row a run and round: the recorded metrics, means over clients; what was sent up to there
cells.csv   a row a cell of a printed table: its form, and ours where it was run
gains.csv   a row a method and client: the gain over Local, a mean over seeds; its spread and their number
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbench.core.files import replace_text
from fedbench.core.options import listed, require

Row = dict[str, Any]
FORMS = ("full", "reduced", "not run")
KEYS = {
    "title": "", "summary": "", "papers": [], "migrated": "", "metric": "personal/accuracy", "percent": True,
    "select": "last", "target": 0.7, "group": None, "labels": {}, "commands": {}, "columns": {}, "tables": {},
    "figures": {}, "pictures": {}, "files": [],
}  # fmt: skip
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Page:
    """A folder's data; ``about`` is page.json with all of its keys."""

    folder: Path
    about: dict[str, Any]
    runs: list[Row] = field(default_factory=list)
    curves: list[Row] = field(default_factory=list)
    cells: list[Row] = field(default_factory=list)
    gains: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @cached_property
    def parts(self) -> list[str]:
        """The names of the page's parts, in the order of runs.csv."""
        return list(dict.fromkeys(row["part"] for row in self.runs))

    @cached_property
    def curve_of(self) -> dict[str, dict[int, Row]]:
        """Of each run the rows of its curve by round."""
        found: dict[str, dict[int, Row]] = {}
        for row in self.curves:
            found.setdefault(row["run"], {})[row["round"]] = row
        return found

    def labels(self, part: str) -> list[str]:
        """The columns by which the runs of a part are told apart."""
        return list(self.about["labels"].get(part, ["method"]))


def read_page(folder: Path) -> Page:
    """A page from its files; ConfigError where one is missing, damaged or says something that is not allowed."""
    path = folder / "page.json"
    require(path.is_file(), f"{folder} is no page: it has no page.json (python -m fedbench pages write makes one)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        require(False, f"{path} is damaged: {error}")
    require(isinstance(about, dict), f"{path} is damaged: it is no mapping")
    check_keys(about, KEYS, str(path))
    about = {**KEYS, **about}
    for key, default in KEYS.items():
        fits = default is None or isinstance(about[key], int | float if key == "target" else type(default))
        require(fits, f"{path}: {key} must be {_kind(default)}, got {about[key]!r}")
    tables = (read_rows(folder / f"{name}.csv") for name in ("runs", "curves", "cells", "gains"))
    page = Page(folder, about, *tables)
    _check(page)
    return page


def write_page(page: Page) -> list[Path]:
    """Write page.json and the nonempty CSV files, remove the empty ones, and return the written paths."""
    page.folder.mkdir(parents=True, exist_ok=True)
    said = {key: value for key, value in page.about.items() if value != KEYS[key]}
    replace_text(page.folder / "page.json", [as_json(said)])
    written = [page.folder / "page.json"]
    for name in ("runs", "curves", "cells", "gains"):
        rows: list[Row] = getattr(page, name)
        path = page.folder / f"{name}.csv"
        if rows:
            written.append(path)
            replace_text(path, [as_csv(rows)])
        else:
            path.unlink(missing_ok=True)  # the page has no rows for it
    return written


def as_json(value: Any) -> str:
    """JSON of which everything that fits in a line is one, so that a change of one thing is a change of one line."""
    return _lines(value, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or (indent and len(indent) + len(whole) < 118):
        return whole
    inner = indent + "  "
    if isinstance(value, dict):
        ends, parts = "{}", [f"{json.dumps(k, ensure_ascii=False)}: {_lines(v, inner)}" for k, v in value.items()]
    else:
        ends, parts = "[]", [_lines(v, inner) for v in value]
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{ends[1]}"


def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV file, none where there is no file: numbers as numbers, empty cells as None, the rest as text."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    require(bool(header) and len(set(header)) == len(header), f"{path} is damaged: its first line names no columns")
    odd = next((i for i, line in enumerate(lines, start=2) if len(line) != len(header)), None)
    require(odd is None, f"{path} is damaged: line {odd} has not {len(header)} cells")
    return [{name: cell(text) for name, text in zip(header, line)} for line in lines]


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a column for every key of any of them."""
    rows = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return out.getvalue()


def cell(text: str) -> Any:
    """What a cell of a CSV file holds: a whole number, a number, text, or nothing."""
    if not NUMBER.fullmatch(text):
        return text or None
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse a key that is not known, naming the nearest ones."""
    for key in given:
        near = get_close_matches(str(key), list(known), 3, 0.5) or list(known)
        require(key in known, f"{where}: there is no key {key}; the nearest are {listed(near)}")


def _check(page: Page) -> None:
    path = page.folder / "runs.csv"
    for i, row in enumerate(page.runs, start=2):
        missing = [key for key in ("part", "n", "status", "form") if row.get(key) is None]
        require(not missing, f"{path}: line {i} has no {' and no '.join(missing)}")
        require(row["form"] in FORMS, f"{path}: line {i}: form is {row['form']!r}; it is one of {', '.join(FORMS)}")
        require(isinstance(row["n"], int) and row["n"] >= 0, f"{path}: line {i}: n counts runs, got {row['n']!r}")
    known = {row.get("run") for row in page.runs}
    lost = next((row["run"] for row in page.curves if row["run"] not in known), None)
    require(lost is None, f"{page.folder / 'curves.csv'}: runs.csv has no run {lost}")
    for i, row in enumerate(page.cells, start=2):
        require(
            row["form"] in FORMS and (row["form"] == "not run") == (row["ours_n"] is None),
            f"{page.folder / 'cells.csv'}: line {i}: a cell is full or reduced, and ours, or not run and nothing",
        )


def _kind(value: Any) -> str:
    return {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}.get(type(value), "a number")
