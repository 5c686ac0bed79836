"""Printed tables of papers beside the cells that pages of results/ answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.config.paper_tables import read_tables
from fedbench.pages.page import FORMS
from fedbench.report import paper
from fedbench.report.recipes import is_measured

KEYS = ["method", *paper.KEYS]


@dataclass(frozen=True)
class PrintedTable:
    """A printed table of a paper.

    Attributes:
        name: The name that ``fedbench paper`` takes.
        title: The paper and the number of the table.
        fixed: The columns that are equal in all cells.
        heads: The columns that tell the cells apart.
        rows: A dict per cell, or per answer to it: labels, printed, ours, difference, form, run_with, page.
        forms: The numbers of cells that are full, reduced and not run.
        pages: The pages of results/ that answer cells.
        experiments: The rows that can be run: their names and printed methods.
        about: The table's file in conf/paper: command, time, remarks.
    """

    name: str
    title: str
    fixed: str
    heads: list[str]
    rows: list[dict[str, Any]]
    forms: Counter[str]
    pages: list[str]
    experiments: list[paper.Experiment]
    about: dict[str, Any]


def printed_tables(root: Path) -> list[PrintedTable]:
    """Return the tables of fedbench/papers that runs can answer."""
    conf = [root / "conf"]
    files = sorted((root / "results").glob("*/cells.csv"))
    cells: Any = pd.concat(pd.read_csv(f, dtype=dict.fromkeys(KEYS, str)).assign(page=f.parent.name) for f in files)
    known, about = paper.experiments(conf), read_tables(conf)
    tables = []
    for name in paper.tables():
        printed: Any = pd.DataFrame(paper.read_table(name))
        printed = printed[printed["metric"].map(is_measured)]
        if len(printed):
            mine = [experiment for experiment in known if paper.is_named(experiment.paper, name)]
            answers = cells[(cells["table"] == name) & (cells["form"] != "not run")]
            tables.append(_table(name, printed, answers, mine, about.get(name, {})))
    return tables


def _table(
    name: str, printed: Any, answers: Any, experiments: list[paper.Experiment], about: dict[str, Any]
) -> PrintedTable:
    printed = printed.assign(cell=range(len(printed)))
    both = printed.merge(answers.drop(columns="table"), how="left", on=KEYS)
    both["form"] = pd.Categorical(both["form"].fillna("not run"), FORMS, ordered=True)
    both = both.sort_values(["cell", "form"], kind="stable")
    varying = [key for key in paper.KEYS if printed[key].nunique() > 1]
    first = printed.iloc[0]
    return PrintedTable(
        name,
        f"{first['paper']}, table {first['table']}",
        "; ".join(f"{key} {first[key]}" for key in paper.KEYS if key not in varying),
        ["method", *varying],
        [_row(row, ["method", *varying]) for row in both.to_dict("records")],
        Counter(both.drop_duplicates("cell")["form"]),
        sorted(answers["page"].unique()),
        experiments,
        about,
    )


def _row(row: dict[str, Any], heads: list[str]) -> dict[str, Any]:
    is_run = row["form"] != "not run"
    return {
        "labels": [row[head] for head in heads],
        "printed": spread(float(row["mean"]), float(row["std"] or "nan")),
        "ours": spread(row["ours"], row["ours_std"]) if is_run else "",
        "difference": f"{row['ours'] - float(row['mean']):+,.2f}" if is_run else "",
        "form": row["form"],
        "run_with": row["run_with"] if isinstance(row["run_with"], str) else "",
        "page": row["page"] if is_run else "",
    }


def spread(mean: float, std: float) -> str:
    """Return "mean ± std", without the std where it is missing."""
    return f"{mean:,.2f}" + (f" ± {std:,.2f}" if pd.notna(std) else "")
