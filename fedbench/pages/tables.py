"""The tables that page.json asks for, made of a page's CSV files and of the printed ones in fedbench/papers.

    groups    a row for each group of runs; its columns are scores, or scores of other groups (``where``, ``part``)
    rounds    a row for each of some rounds of curves.csv; its columns are groups
    paper     a printed table beside ours, cell by cell         ranking   Kendall's tau of its columns
    csv       a CSV file as it stands, for what is no score of runs

docs/results.md says what each takes.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from fedbench.core.options import listed, require
from fedbench.pages.groups import Group, alone, groups_of, is_chosen, one_group
from fedbench.pages.printed import cells_of, ours_spread, printed_spread
from fedbench.pages.store import Page, check_keys
from fedbench.report import paper
from fedbench.report.summary import over_seeds
from fedbench.report.table import Column, Spread, Table, show
from fedbench.report.words import label_columns, told

SHOWN_KEYS = ("over", "plain", "each", "where", "part", "text", "printed", "ours", "less", "signed")
COLUMN_KEYS = ("key", "title", "digits", "scale", "none", *SHOWN_KEYS)


@dataclass(frozen=True)
class Shown:
    """A column as page.json says it: what it takes of which group, and how that is written."""

    column: Column
    over: str | None = None
    plain: bool = False  # the mean alone
    each: bool = False  # the value of each seed
    where: Mapping[str, Any] | None = None
    part: str | None = None
    text: str | list[str] | None = None  # of several the first of which every column has a value
    printed: Mapping[str, Any] | None = None  # a cell of a table in fedbench/papers
    ours: Mapping[str, Any] | None = None  # a cell of cells.csv
    less: Mapping[str, Any] | None = None  # the printed cell from which a difference is taken
    signed: bool = False

    @property
    def form(self) -> Column:
        """The column as a table has it: texts, and numbers with their sign, are written already."""
        is_written = self.text is not None or self.less is not None or self.signed
        return replace(self.column, digits=None) if is_written else self.column


def make_table(page: Page, name: str) -> Table:
    """A table of page.json by its name; ConfigError where there is none, or it asks for what is not there."""
    require(name in page.about["tables"], f"{page.folder}: page.json has no table {name}; there are "
            + listed(page.about["tables"]))  # fmt: skip
    spec = dict(page.about["tables"][name])
    kind = spec.pop("kind", "groups")
    require(kind in KINDS, f"{page.folder}: table {name}: kind is {kind!r}; it is one of {', '.join(KINDS)}")
    make, keys = KINDS[kind]
    check_keys(spec, (*keys, "notes"), f"{page.folder}: table {name}")
    spec.pop("notes", None)
    return make(page, spec)


def known_columns(page: Page) -> dict[str, dict[str, Any]]:
    """The columns that are named alone: those of a report, and those that the page defines."""
    scale, digits = (100, 2) if page.about["percent"] else (1, 4)
    target = f"{page.about['target'] * scale:g}" + ("%" if scale == 100 else "")
    score = {"digits": digits, "scale": scale}
    titles = {"last": "last", "best": "best", "best_val": "best by val", "worst": "worst tenth", "global": "global"}
    gains = {"gain_last": "gain@last", "gain_best_mean": "gain@best_mean", "gain_own_best": "gain@own_best"}
    columns = {
        "n": {"title": "n"},
        "counted": {"title": "over clients", "none": "all"},
        **{key: {"title": title, **score} for key, title in titles.items()},
        "rounds_to_target": {"title": f"rounds to {target}", "digits": 1, "none": "never"},
        "seconds_to_target": {"title": f"s to {target}", "digits": 1, "none": "never"},
        "images_per_s": {"title": "images/s", "digits": 0},
        **{key: {"title": title, "over": f"{key}_clients", **score} for key, title in gains.items()},
        "gain_better": {"title": "better@own_best (%)", "digits": 0, "scale": 100},
        **{f"mb_{d}": {"key": f"bytes_{d}", "title": f"MB {d}", "scale": 1e-6} for d in ("up", "down")},
        **{f"part_{d}": {"title": f"{d} (% of dense)", "scale": 100} for d in ("up", "down")},
        "mb_to_target": {"key": "bytes_to_target", "title": f"MB to {target}", "scale": 1e-6, "none": "never"},
    }
    return {key: {"key": key, **column} for key, column in {**columns, **page.about["columns"]}.items()}


def column_of(page: Page, said: str | Mapping[str, Any]) -> Shown:
    """A column from its name, or from what page.json says of it (over what is known of its key)."""
    known = known_columns(page)
    key = said if isinstance(said, str) else said.get("key")
    asked = {} if isinstance(said, str) else dict(said)
    spec = {**known.get(str(key), {}), **asked} if key is not None else asked
    where = f"{page.folder}: column {spec.get('title', key)}"
    require(isinstance(said, Mapping) or key in known, f"{where}: page.json defines no such column")
    check_keys(spec, COLUMN_KEYS, where)
    form = Column(
        spec.get("key", ""),
        spec.get("title", key),
        spec.get("digits", 2),
        spec.get("scale", 1),
        spec.get("none", "-"),
    )
    return Shown(form, **{name: value for name, value in spec.items() if name in SHOWN_KEYS})


def cell_value(page: Page, shown: Shown, group: Group | None, labels: Mapping[str, Any]) -> Any:
    """What stands in a cell: of a group (None: there is none), of a row with these labels."""
    if shown.text is not None:
        return _text(page, shown, group, labels)
    if shown.printed is not None:
        return printed_spread(shown.printed, labels)
    if shown.each and group is not None:
        return ", ".join(show(one.rows[0].get(shown.column.key), shown.column) for one in alone(group))
    if shown.ours is not None:
        value: Any = ours_spread(page, shown.ours, labels)
    else:
        value = None if group is None else group.value(shown.column.key, shown.over)
    if shown.less is not None:
        printed = printed_spread(shown.less, labels)
        known = isinstance(value, Spread) and value.count and printed is not None
        digits, scale = shown.column.digits, shown.column.scale
        return written(f"{value.mean * scale - printed.mean:+,.{digits}f}") if known else None
    if shown.signed and isinstance(value, Spread) and value.count:
        return written(f"{value.mean * shown.column.scale:+,.{shown.column.digits}f}")
    return value.mean if shown.plain and isinstance(value, Spread) else value


def _text(page: Page, shown: Shown, group: Group | None, labels: Mapping[str, Any]) -> Any:
    """A text with names of columns in braces, each as it would be shown alone; None where one has no value."""
    for text in shown.text if isinstance(shown.text, list) else [str(shown.text)]:
        columns = {name: column_of(page, name) for _, name, _, _ in Formatter().parse(text) if name}
        values = {name: cell_value(page, column, group, labels) for name, column in columns.items()}
        if not any(value is None or (isinstance(value, Spread) and not value.count) for value in values.values()):
            words = text.format_map({name: show(values[name], column.column) for name, column in columns.items()})
            return written(words) if re.match(r"[-+]?\d", words) else words
    return None


def groups_table(page: Page, spec: Mapping[str, Any]) -> Table:
    """A row for each group, or for each that differs in the labels ``rows``."""
    part = spec.get("part", page.parts[0] if len(page.parts) == 1 else None)
    require(part is not None, f"{page.folder}: a table of a page with several parts names one: part")
    labels = spec.get("rows", page.labels(part))
    columns = [column_of(page, said) for said in spec["columns"]]
    groups = groups_of(page, part, spec.get("where"))
    if spec.get("has"):
        groups = [g for g in groups if any(row.get(spec["has"]) is not None for row in g.rows)]
    if spec.get("order"):
        groups = _sorted(groups, spec["order"])
    by_row: dict[Any, list[Group]] = {}
    for group in groups:
        by_row.setdefault(tuple(group.labels.get(name) for name in labels), []).append(group)
    rows = []
    for key, members in by_row.items():
        of = dict(zip(labels, key))
        names = {name: spec.get("names", {}).get(str(value), value) for name, value in of.items()}
        cells = {f"{i}": _cell(page, shown, members, of) for i, shown in enumerate(columns)}
        rows.append({**names, "tuned": any(group.tuned for group in members), **cells})
    titles = spec.get("titles", {})
    heads = [replace(head, title=titles.get(head.key, head.title)) for head in label_columns(labels)]
    return told(Table(spec.get("title", ""), [*heads, *_numbered(columns)], rows), labels)


def _cell(page: Page, shown: Shown, members: list[Group], labels: Mapping[str, Any]) -> Any:
    """What a column shows of the one group of a row that it means."""
    found = members if shown.part is None else groups_of(page, shown.part, labels)
    found = [group for group in found if is_chosen(group.labels, shown.where or {})]
    if shown.printed is None and shown.ours is None:
        require(len(found) < 2, f"{page.folder}: column {shown.column.title}: {len(found)} groups are {labels}: "
                "page.json says which by where")  # fmt: skip
    return cell_value(page, shown, found[0] if found else None, labels)


def _numbered(columns: list[Shown]) -> list[Column]:
    """Columns under their places, as several may show one key."""
    return [replace(shown.form, key=f"{i}") for i, shown in enumerate(columns)]


def _sorted(groups: list[Group], order: list[str]) -> list[Group]:
    """By keys, the last one counting least; a - before a key: largest first; what has no number comes last."""
    for key in reversed(order):
        name, sign = key.removeprefix("-"), -1 if key.startswith("-") else 1

        def place(group: Group, name: str = name, sign: int = sign) -> tuple[bool, float, str]:
            value = group.labels[name] if name in group.labels else group.value(name)
            number = value.mean if isinstance(value, Spread) else value
            if isinstance(number, int | float) and not math.isnan(number):
                return (False, sign * number, "")
            return (True, 0.0, number if isinstance(number, str) else "")

        groups = sorted(groups, key=place)
    return groups


def curve_at(page: Page, group: Group, key: str, round: int) -> Spread:
    """A recorded metric at a round, over seeds."""
    of_runs = [page.curve_of.get(run["run"], {}) for run in group.rows]
    rows = [by_round[round] for by_round in of_runs if round in by_round]
    require(bool(rows), f"{page.folder}: curves.csv has no round {round} of {group.labels}")
    if len(group.rows) == 1 and group.n != 1:
        return Spread(rows[0][key], rows[0].get(f"{key}_std"), group.n, group.n)
    return over_seeds(row.get(key) for row in rows)


def rounds_table(page: Page, spec: Mapping[str, Any]) -> Table:
    """A row for each round, a column for each group; ``below`` are rows of scores and of printed numbers."""
    columns = [column_of(page, {"key": spec.get("key", page.about["metric"]), "digits": spec.get("digits", 2),
                                "scale": spec.get("scale", 100 if page.about["percent"] else 1), **said})
               for said in spec["columns"]]  # fmt: skip
    groups = [one_group(page, shown.part or spec.get("part"), [], shown.where or {}) for shown in columns]
    rows: list[dict[str, Any]] = []
    for round in spec["rounds"]:
        found = {f"{i}": curve_at(page, g, s.column.key, round) for i, (s, g) in enumerate(zip(columns, groups))}
        rows.append({"round": round, **found})
    for said in spec.get("below", []):
        row: dict[str, Any] = {"round": said["title"]}
        for i, group in enumerate(groups):
            shown = column_of(page, said)
            row[f"{i}"] = show(cell_value(page, shown, group, group.labels), shown.form)
        rows.append(row)
    return Table(spec.get("title", ""), [Column("round", "round", digits=None), *_numbered(columns)], rows)


def paper_table(page: Page, spec: Mapping[str, Any]) -> Table:
    """A printed table beside ours: the cells that were run, in full or reduced; ``columns`` picks some by key."""
    name = spec["paper"]
    cells = [cell for cell in cells_of(page, name) if cell.runs]
    return paper.cell_table(name, cells, wanted=spec.get("columns"), title=spec.get("title"))


def ranking_table(page: Page, spec: Mapping[str, Any]) -> Table:
    """Kendall's tau of each column of a printed table."""
    table = paper.ranking_table(cells_of(page, spec["paper"]))
    require(table is not None, f"{page.folder}: cells.csv has no two methods of a column of {spec['paper']}")
    return table or Table("", [])


class Written(float):
    """A number as its text has it, with its last zeros or its spread: ``0.80``, ``7.7 (5.5 to 9.4)``."""

    text = ""

    def __str__(self) -> str:
        return self.text


def written(text: str) -> Written:
    """Text that begins with a number, as that number."""
    begin = re.search(r"[-+]?\d[\d.,]*", text)
    number = Written(begin.group().rstrip(".,").replace(",", "") if begin else "nan")
    number.text = text
    return number


def csv_table(page: Page, spec: Mapping[str, Any]) -> Table:
    """The cells of a CSV file as they stand; a column of which every cell begins with a number is one of numbers."""
    path = page.folder / spec["file"]
    require(path.is_file(), f"{path} is not there; page.json asks for it")
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    odd = next((i for i, line in enumerate(lines, start=2) if len(line) != len(header)), None)
    require(bool(lines) and odd is None, f"{path} has no rows, or as line {odd} one of another length than the first")
    numbers = [all(re.match(r"\**~?[-+]?\d", line[i]) for line in lines if line[i]) for i in range(len(header))]
    rows = [{f"{i}": written(text) if text and numbers[i] else text or None for i, text in enumerate(line)}
            for line in lines]  # fmt: skip
    return Table(spec.get("title", ""), [Column(f"{i}", t, None, none="") for i, t in enumerate(header)], rows)


GROUPS = ("part", "rows", "columns", "where", "has", "order", "title", "titles", "names")
ROUNDS = ("part", "key", "rounds", "columns", "below", "title", "digits", "scale")
Maker = Callable[[Page, Mapping[str, Any]], Table]
KINDS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "groups": (groups_table, GROUPS),
    "rounds": (rounds_table, ROUNDS),
    "paper": (paper_table, ("paper", "columns", "title")),
    "ranking": (ranking_table, ("paper",)),
    "csv": (csv_table, ("file", "title")),
}
