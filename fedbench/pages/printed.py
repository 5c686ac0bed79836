"""Printed numbers, from fedbench/papers, and the cells of a printed table that a page answers, from cells.csv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbench.core.options import listed, require
from fedbench.pages.store import Page, Row
from fedbench.report import paper
from fedbench.report.runs import Run
from fedbench.report.table import Spread


def printed_spread(asked: Mapping[str, Any], labels: Mapping[str, Any]) -> Spread | None:
    """A printed mean and std, None where the paper has none: ``{"table": ..., "method": "$method", ...}``.

    A value such as ``$method`` is that label's; ConfigError where several rows of the table are meant.
    """
    wanted = _wanted(asked, labels)
    rows = paper.read_table(asked["table"])
    odd = [column for column in wanted if column not in rows[0]]
    require(not odd, f"{asked['table']} has no column {listed(odd)}; there are {listed(rows[0])}")
    found = [row for row in rows if all(row[column] == value for column, value in wanted.items())]
    require(len(found) < 2, f"{len(found)} rows of {asked['table']} are {wanted}: name more of its columns")
    return paper.Cell(found[0]).printed if found else None


def ours_spread(page: Page, asked: Mapping[str, Any], labels: Mapping[str, Any]) -> Spread | None:
    """Ours of one cell of cells.csv, named as by ``printed_spread``; None where it was not run."""
    wanted = _wanted(asked, labels)
    found = [row for row in page.cells if row["table"] == asked["table"] and row["ours"] is not None
             and all(str(row.get(column)) == value for column, value in wanted.items())]  # fmt: skip
    require(len(found) < 2, f"{page.folder / 'cells.csv'}: {len(found)} cells are {wanted}: name more of its columns")
    return _spread(found[0]) if found else None


def _spread(cell: Row) -> Spread:
    """Return the spread of our values in a row of cells.csv, which holds ours_of if some runs lack a value."""
    return Spread(cell["ours"], cell["ours_std"], cell["ours_n"], cell.get("ours_of") or cell["ours_n"])


def _wanted(asked: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a printed table that are asked for and their values, ``$`` and a label's name replaced by it."""
    return {column: str(labels[value[1:]]) if str(value).startswith("$") else str(value)
            for column, value in asked.items() if column != "table"}  # fmt: skip


def cells_of(page: Page, table: str) -> list[paper.Cell]:
    """The cells of a printed table as the page answers them; one that is not in cells.csv is not run."""
    ours: dict[tuple[str, ...], list[Row]] = {}
    for row in page.cells:
        if row["table"] == table:
            ours.setdefault(tuple(str(row[key]) for key in ("method", *paper.KEYS)), []).append(row)
    rows = [row for row in paper.read_table(table) if paper.is_measured(row["metric"])]
    known = {tuple(row[key] for key in ("method", *paper.KEYS)) for row in rows}
    lost = next((key for key in ours if key not in known), None)
    require(lost is None, f"{page.folder / 'cells.csv'}: {table} has no cell {lost}")
    cells = []
    for row in rows:
        for cell in ours.get(tuple(row[key] for key in ("method", *paper.KEYS)), [None]):
            cells.append(paper.Cell(row) if cell is None or cell["form"] == "not run" else _answered(page, row, cell))
    return cells


def _answered(page: Page, row: dict[str, str], ours: Row) -> paper.Cell:
    value = _spread(ours)
    runs = [Run(page.folder)] * value.of  # only tested for being empty
    return paper.Cell(row, runs, ours["run_with"] or "", ours["form"] == "reduced", value, ours["sigma"],
                      bool(ours.get("tuned_at_end")), ours.get("counted"))  # fmt: skip
