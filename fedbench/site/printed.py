"""The papers' printed tables, cell by cell: printed, ours and in which form, or how it would be run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedbench.pages.printed import cells_of
from fedbench.pages.store import FORMS, Page, read_page
from fedbench.report import paper
from fedbench.report.recipes import is_measured
from fedbench.report.table import Column, show

NUMBER = Column("", "", none="")


@dataclass(frozen=True)
class Row:
    """A printed cell, or one of several answers to it.

    labels: the method and what else names it.  form: full, reduced or not run.  page: of results/, "" for none.
    """

    labels: list[str]
    printed: str
    ours: str
    difference: str
    form: str
    run_with: str
    page: str


@dataclass(frozen=True)
class PrintedTable:
    """name: as --paper takes it.  title: paper and number.  fixed: what all cells share.  heads: of the labels.

    forms: how many printed cells are full, reduced and not run.  commands: lines that say how to run what is not.
    """

    name: str
    title: str
    fixed: str
    heads: list[str]
    rows: list[Row]
    forms: Counter[str]
    pages: list[str]
    commands: list[str]


def printed_tables(root: Path) -> list[PrintedTable]:
    """Every table of fedbench/papers that runs can answer, with the answers that the pages of results/ have."""
    pages = [read_page(path.parent) for path in sorted((root / "results").glob("*/cells.csv"))]
    known = paper.experiments([root / "conf"])
    tables = (_table(name, [page for page in pages if name in page.about["papers"]], known) for name in paper.tables())
    return [table for table in tables if table.rows]


def _table(name: str, pages: list[Page], known: list[paper.Experiment]) -> PrintedTable:
    printed = [row for row in paper.read_table(name) if is_measured(row["metric"])]
    answers: dict[tuple[str, ...], list[tuple[str, paper.Cell]]] = {_key(row): [] for row in printed}
    for page in pages:
        for cell in cells_of(page, name):
            if cell.runs:
                answers[_key(cell.row)].append((page.name, cell))
    varying = [key for key in paper.KEYS if len({row[key] for row in printed}) > 1]
    fixed = "; ".join(f"{key} {printed[0][key]}" for key in paper.KEYS if key not in varying) if printed else ""
    rows: list[Row] = []
    cells: list[paper.Cell] = []
    forms = Counter[str]()
    for row in printed:
        found = answers[_key(row)] or [("", paper.Cell(row))]
        cells += [cell for _, cell in found]
        labels = [row[key] for key in ("method", *varying)]
        mine = sorted((_row(labels, page, cell) for page, cell in found), key=lambda one: FORMS.index(one.form))
        rows += mine
        forms[mine[0].form] += 1
    title = f"{printed[0]['paper']}, table {printed[0]['table']}" if printed else name
    lines = paper.commands(name, cells, known) if printed else []
    return PrintedTable(name, title, fixed, ["method", *varying], rows, forms, [page.name for page in pages], lines)


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[key] for key in ("method", *paper.KEYS))


def _row(labels: list[str], page: str, cell: paper.Cell) -> Row:
    form = "not run" if not cell.runs else "reduced" if cell.reduced else "full"
    ours = show(cell.ours, NUMBER) if cell.runs else ""
    difference = f"{cell.difference:+.2f}" if ours else ""
    return Row(labels, show(cell.printed, NUMBER), ours, difference, form, cell.overrides, page)
