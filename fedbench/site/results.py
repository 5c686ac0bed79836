"""Results of a method: groups of runs with equal labels (name, options) in results/, and rows of printed tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.config.conf_tree import read_option
from fedbench.pages.page import Group, Page, groups_of, read_page
from fedbench.report import paper
from fedbench.report.display import METHOD_KEYS, method_name, metric_title
from fedbench.report.paper_metrics import normalized
from fedbench.report.table import Column, format_cell


def rows_of_tables(conf: Path) -> Any:
    """Return which methods of printed tables (their rows) the experiment files run.

    Args:
        conf: The folder conf of the repository.

    Returns:
        A DataFrame with the columns experiment, algorithm (the option) and method (the printed name).
    """
    rows = []
    for experiment in paper.experiments([conf]):
        algorithm = _algorithm(f"experiment/{experiment.name}", conf)
        rows += [{"experiment": experiment.name, "algorithm": algorithm, "method": m} for m in experiment.methods]
    return pd.DataFrame(rows).dropna()  # without the experiments that choose no algorithm


def _algorithm(name: str, conf: Path) -> str | None:
    """Return the option of ``algorithm=`` that an experiment chooses, or an experiment that it includes; None if none.

    Args:
        name: The path of the experiment below conf, without suffix.
        conf: The folder conf of the repository.
    """
    chosen = None
    for entry in read_option(name, [conf]).get("defaults") or []:
        if isinstance(entry, dict):
            chosen = entry.get("override /algorithm", chosen)
        elif entry.startswith("/experiment/"):
            chosen = _algorithm(entry[1:], conf) or chosen
    return chosen


def results_of(root: Path, options: Iterable[str], rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of runs in results/ of each option of ``algorithm=``.

    The label of a group is an option, its name in papers, or the name of a row of a printed table.  If the name of a
    row means several options, the one of most experiments is used.

    Args:
        root: The root of the repository.
        options: The options.
        rows: The rows of printed tables, from `rows_of_tables`.

    Returns:
        For each option a list of dicts with page, title, setting, metric, form, n, last and best, as text but for n.
    """
    # names: from the letters and digits of a name, in lower case, to the option
    by_method = rows.groupby(rows["method"].map(normalized))["algorithm"]
    names = by_method.agg(lambda algorithms: algorithms.value_counts(sort=True).index[0]).to_dict()
    results: dict[str, list[dict[str, Any]]] = {option: [] for option in options}
    names |= {normalized(name): option for option in results for name in (method_name(option), option)}
    for path in sorted((root / "results").glob("*/runs.csv")):
        page = read_page(path.parent)
        added = set()  # two parts of a page may have the same runs
        for part in page.parts:
            for group in groups_of(page, part):
                # the first label that names the method, such as "name" or "algorithm"
                label = next((str(group.labels[key]) for key in METHOD_KEYS if group.labels.get(key)), "")
                option = option_of(label, names)
                if option is None:
                    continue
                result = _result(page, part, group, label, option)
                identity = (label, result["last"], result["best"])
                if identity not in added:
                    added.add(identity)
                    results[option].append(result)
    return results


def option_of(label: str, names: Mapping[str, str]) -> str | None:
    """Return the option that a label or one of its words names; None if there is none.

    "PGFed, bounded" names pgfed, and "Prompt+FedPer" names fedper.

    Args:
        label: The label.
        names: A dict from the letters and digits of an option's name, in lower case, to the option.
    """
    candidates = [label, *re.split(r"[^\w]+", label)]
    return next((names[word] for word in map(normalized, candidates) if word in names), None)


def _result(page: Page, part: str, group: Group, label: str, option: str) -> dict[str, Any]:
    """Return a row of a method's table of results, about a group of runs with the same setting.

    Args:
        page: The page of results/ with the runs.
        part: The part of the page with the runs.  The row names it unless it is the first part.
        group: The runs.
        label: The name of the method on the page.  The row names it unless it is the option's name.
        option: The option of ``algorithm=``.

    Returns:
        The cells of the row as text by column, but "n", the number of runs, as a number.
    """
    setting = [] if part == page.parts[0] else [part]
    setting += [] if normalized(label) == normalized(option) else [method_name(label)]
    setting += [f"{name.rpartition('.')[2]}={value}" for name, value in group.labels.items()
                if name not in METHOD_KEYS and value is not None]  # fmt: skip
    column = Column(key="", title="", scale=page.scale, missing="")  # only for the format of numbers
    last, best = (format_cell(group.spread(key), column) for key in ("last", "best"))
    return {
        "page": page.name,
        "title": page.about["title"],
        "setting": ", ".join(setting),
        "metric": metric_title(page.about["metric"]),
        "form": ", ".join(sorted(group.rows["form"].unique())),  # "full", or "reduced": a smaller setting than printed
        "n": group.n,
        "last": last or best or "other scores: see the page",
        "best": best,
    }
