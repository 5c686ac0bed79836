"""Printed tables of papers with our values from the pages of results/."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.config.paper_tables import read_tables
from fedbench.pages.page import FORMS
from fedbench.report import paper
from fedbench.report.paper_metrics import is_measured

CELL_KEYS = ["method", *paper.KEYS]


@dataclass(frozen=True)
class PrintedTable:
    """A printed table of a paper.

    Attributes:
        name: The argument of ``fedbench paper``.
        title: The paper and the number of the table.
        common: The columns that are equal in all cells, with their values, as a text.
        labels: The columns that identify cells.
        rows: A dict of texts per value of a cell (labels, a list of them): labels, printed, ours, difference, form,
            run_with, page.
        forms: The number of cells of each form: full, reduced, not run.
        pages: The pages of results/ with its cells.
        experiments: The experiments of its rows.
        about: The content of its file in conf/paper: command, time, remarks.
    """

    name: str
    title: str
    common: str
    labels: list[str]
    rows: list[dict[str, Any]]
    forms: Counter[str]
    pages: list[str]
    experiments: list[paper.Experiment]
    about: dict[str, Any]


def printed_tables(root: Path) -> list[PrintedTable]:
    """Return the tables of fedbench/papers that have a metric of fedbench, with our values from results/.

    Args:
        root: The root of the repository.
    """
    conf = [root / "conf"]
    dtypes: Any = dict.fromkeys(CELL_KEYS, str)
    files = sorted((root / "results").glob("*/cells.csv"))
    cells: Any = pd.concat(pd.read_csv(file, dtype=dtypes).assign(page=file.parent.name) for file in files)
    experiments, descriptions = paper.experiments(conf), read_tables(conf)
    tables = []
    for name in paper.tables():
        reported: Any = pd.DataFrame(paper.read_table(name))
        reported = reported[reported["metric"].map(is_measured)]
        if len(reported):
            # form: full, reduced (a smaller setting than printed) or not run; without cells for which there is no run
            ours = cells[(cells["table"] == name) & (cells["form"] != "not run")]
            of_table = [experiment for experiment in experiments if paper.names_table(experiment.paper, name)]
            tables.append(_table(name, reported, ours, of_table, descriptions.get(name, {})))
    return tables


def _table(
    name: str, reported: Any, ours: Any, experiments: list[paper.Experiment], about: dict[str, Any]
) -> PrintedTable:
    """Return a paper's table with our values.

    Args:
        name: The name of the table.
        reported: A DataFrame of its CSV file, with a row per printed cell.
        ours: A DataFrame with the rows of the cells.csv of all pages that have our values of these cells.
        experiments: The experiments of its rows.
        about: The content of its file in conf/paper.
    """
    reported = reported.assign(cell=range(len(reported)))  # keeps the order of the cells, and their identity
    # A row per printed cell and our value of it; several rows if pages have several values.
    # CELL_KEYS: the columns that identify a cell.
    merged = reported.merge(ours.drop(columns="table"), how="left", on=CELL_KEYS)
    # form: how our run relates to the printed one, such as full, reduced (a smaller setting) or not run
    merged["form"] = pd.Categorical(merged["form"].fillna("not run"), FORMS, ordered=True)
    merged = merged.sort_values(["cell", "form"], kind="stable").astype({"mean": float})
    first = reported.iloc[0]
    varying = [key for key in paper.KEYS if reported[key].nunique() > 1]
    labels = ["method", *varying]
    rows = []
    for row in merged.to_dict("records"):
        is_run = row["form"] != "not run"
        rows.append({
            "labels": [row[label] for label in labels],
            "printed": spread(row["mean"], float(row["std"] or "nan")),
            "ours": spread(row["ours"], row["ours_std"]) if is_run else "",
            "difference": f"{row['ours'] - row['mean']:+,.2f}" if is_run else "",
            "form": row["form"],
            "run_with": row["run_with"] if isinstance(row["run_with"], str) else "",  # overrides of the experiment
            "page": row["page"] if is_run else "",
        })  # fmt: skip
    return PrintedTable(
        name=name,
        title=f"{first['paper']}, table {first['table']}",
        common="; ".join(f"{key} {first[key]}" for key in paper.KEYS if key not in varying),
        labels=labels,
        rows=rows,
        forms=Counter(merged.drop_duplicates("cell")["form"]),
        pages=sorted(ours["page"].unique()),
        experiments=experiments,
        about=about,
    )


def spread(mean: float, std: float) -> str:
    """Return "mean ± std" with two decimal places; only the mean if the standard deviation is NaN."""
    return f"{mean:,.2f}" + (f" ± {std:,.2f}" if pd.notna(std) else "")
