"""Runs of a method: its groups in results/, and the rows of printed tables that run it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.config.conf_tree import read_option
from fedbench.pages.page import Group, Page, groups_of, read_page
from fedbench.report import paper
from fedbench.report.table import Column, show
from fedbench.report.words import METHOD, metric_in_words, printed


def rows_of_tables(conf: Path) -> Any:
    """Return a DataFrame of the rows of printed tables: experiment, algorithm (its option) and method (printed)."""
    rows = [
        {
            "experiment": experiment.name,
            "algorithm": _algorithm(f"experiment/{experiment.name}", conf),
            "method": method,
        }
        for experiment in paper.experiments([conf])
        for method in experiment.methods
    ]
    return pd.DataFrame(rows).dropna()


def _algorithm(name: str, conf: Path) -> str | None:
    """Return the algorithm that an experiment, or one that it includes, chooses."""
    chosen = None
    for entry in read_option(name, [conf]).get("defaults") or []:
        if isinstance(entry, dict):
            chosen = entry.get("override /algorithm", chosen)
        elif entry.startswith("/experiment/"):
            chosen = _algorithm(entry[1:], conf) or chosen
    return chosen


def results_of(root: Path, options: Iterable[str], rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of runs in results/ of each option of algorithm=, each group once.

    A label names an option by the option, its printed name, or a row of a table (CoOp: local).  Where a row is another
    method in another paper, the option of most experiments counts.
    """
    by_row = rows.groupby(rows["method"].map(key))["algorithm"]
    names = by_row.agg(lambda chosen: chosen.value_counts(sort=True).index[0]).to_dict()
    found: dict[str, list[dict[str, Any]]] = {option: [] for option in options}
    names |= {key(name): option for option in found for name in (printed(option), option)}
    for path in sorted((root / "results").glob("*/runs.csv")):
        page = read_page(path.parent)
        shown = set()  # a page may have the same runs in two parts
        for part in page.parts:
            for group in groups_of(page, part):
                label = next((str(group.labels[name]) for name in METHOD if group.labels.get(name)), "")
                option = option_of(label, names)
                result = _result(page, part, group, label, option) if option is not None else {}
                if option is not None and (seen := (label, result["last"], result["best"])) not in shown:
                    found[option].append(result)
                    shown.add(seen)
    return found


def option_of(label: str, names: Mapping[str, str]) -> str | None:
    """Return the option that a label names: pgfed for "PGFed, bounded", fedper for "Prompt+FedPer".

    names: Options by the `key` of their names.
    """
    words = re.split(r"[^\w]+", label)
    return next((names[name] for name in map(key, [label, *words]) if name in names), None)


def key(name: str) -> str:
    """Return a method's name without differences of spelling: fedavglocal for FedAvg-local."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _result(page: Page, part: str, group: Group, label: str, option: str) -> dict[str, Any]:
    of_part = [part] if part != page.parts[0] else []
    of_label = [] if key(label) == key(option) else [printed(label)]
    others = [f"{name.rpartition('.')[2]}={value}" for name, value in group.labels.items()
              if name not in METHOD and value is not None]  # fmt: skip
    form = Column("", "", scale=page.scale, none="")
    last, best = (show(group.spread(name), form) for name in ("last", "best"))
    return {
        "page": page.name, "title": page.about["title"], "setting": ", ".join([*of_part, *of_label, *others]),
        "metric": metric_in_words(page.about["metric"]), "form": ", ".join(sorted(group.rows["form"].unique())),
        "n": group.n, "last": last or best or "other scores: see the page", "best": best,
    }  # fmt: skip
