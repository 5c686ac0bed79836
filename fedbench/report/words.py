"""How tables and figures say things: methods by their printed names, metrics and config keys in words.

A method is called as the papers call it: the name that its option's file begins with (``# PGFed: Luo et al. ...``). A
method from outside the repository goes by its own name, or its class's. CSV files keep the options' names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fedbench.config.conf_tree import printed_name
from fedbench.report.table import DAGGER, Column, Spread, Table, show
from fedbench.tasks.scores import direction

METHOD = ("method", "name", "algorithm", "choices.algorithm")  # labels that say which method a row or a line is of
TUNED = f"{DAGGER} fine-tuned after the last round only: the last value is of fine-tuned models, all before are not."
OF = {
    "personal": "mean over clients",
    "global": "global model, mean over clients",
    "val": "validation, mean over clients",
    "train": "training, mean over clients",
}
ENDS = {"_worst": "worst tenth of clients", "_std": "standard deviation over clients",
        "_weighted": "weighted by samples"}  # fmt: skip
SHORT = {"auc": "AUC", "f1": "F1", "iou": "IoU", "lr": "learning rate", "mb": "MB", "s": "seconds"}
GREEK = {"lam": "λ", "lambda": "λ", "mu": "μ", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε",
         "eta": "η", "tau": "τ", "rho": "ρ", "sigma": "σ"}  # fmt: skip


@lru_cache
def printed(method: str, conf: tuple[Path, ...] | None = None) -> str:
    """Return PGFed for pgfed, FedAvg+FT for fedavg+ft; the name itself if it is no option of the conf folders.

    conf: the conf folders (None: fedbench's).
    """
    option, plus, end = method.partition("+")
    name = printed_name("algorithm", option, conf) if end in ("", "ft") else None
    return method if name is None else f"{name}{plus}{end.upper()}"


def line_of(labels: Mapping[str, Any], tuned: bool = False, conf: tuple[Path, ...] | None = None) -> str:
    """One line for a legend: the method's printed name, with a dagger where it is fine-tuned at the end, and what else
    tells it apart."""
    words = [printed(str(value), conf) + DAGGER * tuned if key in METHOD else f"{key.rpartition('.')[2]}={value}"
             for key, value in labels.items() if value is not None]  # fmt: skip
    return " ".join(words)


def lines_of(
    labels: Sequence[Mapping[str, Any]], tuned: Sequence[bool], conf: tuple[Path, ...] | None = None
) -> tuple[list[str], str]:
    """The lines of a legend, each by the labels that differ among them, and what all share, for the title.

    labels, tuned: of every line.
    """
    keys = [key for key in dict.fromkeys(k for each in labels for k in each)
            if len(labels) > 1 and len({repr(each.get(key)) for each in labels}) == 1
            and (key not in METHOD or len(set(tuned)) == 1)]  # fmt: skip
    if labels and len(keys) == len(labels[0]):
        keys = []  # nothing would be left
    shared = line_of({key: labels[0][key] for key in keys}, tuned[0], conf) if keys else ""
    each_line = ({key: value for key, value in each.items() if key not in keys} for each in labels)
    return [line_of(own, is_tuned, conf) for own, is_tuned in zip(each_line, tuned)], shared


def metric_in_words(metric: str) -> str:
    """Accuracy, mean over clients, for personal/accuracy."""
    scope, _, score = metric.rpartition("/")
    end = next((end for end in ENDS if score.endswith(end)), "")
    of = ", ".join(filter(None, (OF.get(scope, scope), ENDS.get(end, ""))))
    of = of.replace("mean over clients, ", "") if end else of
    return ", ".join(filter(None, (in_words(score.removesuffix(end)), of)))


def of_each_client(metric: str) -> str:
    """Accuracy of each client, for personal/accuracy."""
    return f"{in_words(metric.rpartition('/')[2])} of each client"


def metric_axis(metric: str) -> str:
    """Accuracy, mean over clients (%): what is written beside an axis."""
    return metric_in_words(metric) + (" (%)" if direction(metric).fraction else "")


def in_words(key: str) -> str:
    """The last part of a dotted key as a reader says it: Number of experts for num_experts, λ for lam."""
    last = key.rpartition(".")[2]
    if last in GREEK:
        return GREEK[last]
    words = ["number of" if word == "num" else SHORT.get(word, word) for word in last.split("_")]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def label_columns(keys: Iterable[str], conf: tuple[Path, ...] | None = None) -> list[Column]:
    """The columns of the labels that tell rows apart; methods by their printed names, with a dagger where a row says
    ``tuned``."""
    return [Column(key, key, None, none="", words=partial(printed, conf=conf), mark="tuned") if key in METHOD
            else Column(key, key, None, none="") for key in keys]  # fmt: skip


def tight(table: Table, labels: Sequence[str]) -> Table:
    """The table without columns that tell no row from another: what is the same in all rows (but for measured numbers)
    is said in the title, and a label that repeats words of the first one is left out.

    labels: keys of the columns that tell rows apart; one stays.  Of a single row nothing goes.
    """
    rows = table.rows
    if len(rows) < 2 or not table.columns:
        return table
    shown = {column.key: [show(row.get(column.key), column) for row in rows] for column in table.columns}
    heads = [key for key in labels if len(set(shown[key])) > 1] or list(labels[:1])  # the columns that name a row
    kept: list[Column] = []
    said: list[str] = []
    for column in table.columns:
        key, cells = column.key, shown[column.key]
        measured = key not in labels and any(_is_measured(row.get(key)) for row in rows)
        if len(set(cells)) == 1 and not measured and key != heads[0]:
            between = " = " if column.title == "n" else " " if key in labels else ": "
            words = cells[0] if key in METHOD else f"{column.title}{between}{cells[0]}"
            said += [] if cells[0] in ("", "-") else [words]
        elif key == heads[0] or key not in labels or not all(map(_repeats, cells, shown[heads[0]])):
            kept.append(column)
    return replace(table, columns=kept, title=", ".join(filter(None, [table.title, *said])))


def told(table: Table, labels: Sequence[str]) -> Table:
    """The table as a reader wants it: without columns that tell nothing, and with what its daggers mean."""
    return replace(tight(table, labels), notes=[*table.notes, *footnotes(table)])


def _is_measured(value: Any) -> bool:
    """Whether a cell holds a measured number, which is worth its place even where others are as large."""
    return bool(value.count) if isinstance(value, Spread) else isinstance(value, float) and not math.isnan(value)


def _repeats(text: str, label: str) -> bool:
    """Whether all words of a cell stand in a label already."""
    words, there = (set(re.findall(r"\w+(?:\.\d+)?", part.casefold())) for part in (text, label))
    return words <= there


def footnotes(table: Table) -> list[str]:
    """What the dagger means, where the table has one."""
    marked = any(column.mark and row.get(column.mark) for column in table.columns for row in table.rows)
    return [TUNED] if marked else []
