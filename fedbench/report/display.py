"""How tables and figures display methods, metrics and configuration keys.

A method has the name that papers use: the first words of its option's file (``# PGFed: Luo et al. ...``).  A method
from outside the repository has the name of its option or class.  CSV files contain the names of options.
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
from fedbench.report.table import DAGGER, Column, Spread, Table, format_cell
from fedbench.tasks.scores import direction

METHOD_KEYS = ("method", "name", "algorithm", "choices.algorithm")  # labels that contain the name of a method
TUNED_NOTE = (
    f"{DAGGER} fine-tuned after the last round only: the last value is of fine-tuned models, all before are not."
)
SCOPES = {"personal": "", "global": "global model", "val": "validation", "train": "training"}
AGGREGATES = {
    "_worst": "worst tenth of clients",
    "_std": "standard deviation over clients",
    "_weighted": "weighted by samples",
}
ABBREVIATIONS = {"auc": "AUC", "f1": "F1", "iou": "IoU", "lr": "learning rate", "mb": "MB", "s": "seconds",
                 "num": "number of"}  # fmt: skip
GREEK = {"lam": "λ", "lambda": "λ", "mu": "μ", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eps": "ε",
         "eta": "η", "tau": "τ", "rho": "ρ", "sigma": "σ"}  # fmt: skip


@lru_cache
def method_name(option: str, conf: tuple[Path, ...] | None = None) -> str:
    """Return the name of a method in papers: PGFed for pgfed, FedAvg+FT for fedavg+ft.

    Args:
        option: The option of ``algorithm=``, with or without "+ft".
        conf: The folders in which options are looked up; None for those of fedbench.

    Returns:
        The name.  A text that is not an option is returned unchanged.
    """
    base, plus, suffix = option.partition("+")
    name = printed_name("algorithm", base, conf) if suffix in ("", "ft") else None
    return option if name is None else f"{name}{plus}{suffix.upper()}"


def legend_name(labels: Mapping[str, Any], tuned: bool = False, conf: tuple[Path, ...] | None = None) -> str:
    """Return a legend entry such as "FedProx mu=0.1": the name of the method, and other config values as key=value.

    Args:
        labels: From config key to value, for example {"method": "fedprox", "algorithm.mu": 0.1}.  None is left out.
        tuned: Whether the method fine-tunes after the last round only, which a dagger marks.
        conf: The folders in which options are looked up; None for those of fedbench.
    """
    dagger = DAGGER if tuned else ""
    texts = []
    for key, value in labels.items():
        if value is not None:
            is_method = key in METHOD_KEYS
            texts.append(f"{method_name(str(value), conf)}{dagger}" if is_method else f"{_last_part(key)}={value}")
    return " ".join(texts)


def legend_names(
    labels: Sequence[Mapping[str, Any]], tuned: Sequence[bool], conf: tuple[Path, ...] | None = None
) -> tuple[list[str], str]:
    """Return the entries of a legend without the labels that all lines have in common, and these labels.

    Args:
        labels: For each line, a dict from config key to label.
        tuned: Whether the method of each line fine-tunes after the last round only.
        conf: The folders in which options are looked up; None for those of fedbench.

    Returns:
        The entries, and the common labels as a text for the title ("" if there are none).  If no label distinguishes
        the lines, the entries have all labels.
    """
    keys = dict.fromkeys(key for line_labels in labels for key in line_labels)
    common = [key for key in keys if len({repr(line_labels.get(key)) for line_labels in labels}) == 1]
    if len(set(tuned)) > 1:  # the entries keep the method, because its dagger distinguishes lines
        common = [key for key in common if key not in METHOD_KEYS]
    if len(labels) < 2 or len(common) == len(labels[0]):
        common = []
    entries = []
    for line_labels, is_tuned in zip(labels, tuned):
        distinct = {key: value for key, value in line_labels.items() if key not in common}
        entries.append(legend_name(distinct, is_tuned, conf))
    return entries, legend_name({key: labels[0][key] for key in common}, tuned[0], conf) if common else ""


def metric_title(metric: str) -> str:
    """Return a metric, a column of metrics.csv, in words: "Accuracy, mean over clients" for personal/accuracy."""
    scope, _, score = metric.rpartition("/")
    suffix = next((suffix for suffix in AGGREGATES if score.endswith(suffix)), "")  # such as _std, over clients
    # SCOPES: scopes in words, such as "validation" for val; all of them are means over clients
    aggregate = AGGREGATES.get(suffix, "mean over clients" if scope in SCOPES else "")
    parts = (key_title(score.removesuffix(suffix)), SCOPES.get(scope, scope), aggregate)
    return ", ".join(filter(None, parts))


def client_metric_title(metric: str) -> str:
    """Return a metric of single clients in words: "Accuracy of each client" for personal/accuracy."""
    return f"{key_title(metric.rpartition('/')[2])} of each client"


def metric_axis_label(metric: str) -> str:
    """Return the axis label of a metric: "Accuracy, mean over clients (%)" for personal/accuracy."""
    return metric_title(metric) + (" (%)" if direction(metric).fraction else "")


def key_title(key: str) -> str:
    """Return the last part of a dotted config key in words: "λ" for algorithm.lam, "Local steps" for local_steps."""
    last_part = _last_part(key)
    text = GREEK.get(last_part) or " ".join(ABBREVIATIONS.get(word, word) for word in last_part.split("_"))
    return text[:1].upper() + text[1:] if last_part not in GREEK else text


def _last_part(key: str) -> str:
    """Return the part of a dotted config key after the last point: "mu" for "algorithm.mu"."""
    return key.rpartition(".")[2]


def label_columns(keys: Iterable[str], conf: tuple[Path, ...] | None = None) -> list[Column]:
    """Return the columns of a table whose values identify its rows, such as the method and the data set.

    Methods are displayed by their names in papers, with a dagger if the row has a true value under the key "tuned": if
    they fine-tune after the last round only.

    Args:
        keys: The keys of the columns in the rows.  "method" and the other `METHOD_KEYS` contain methods.
        conf: The folders in which options are looked up; None for those of fedbench.
    """
    columns = []
    for key in keys:
        column = Column(key, title=key, digits=None, missing="")
        if key in METHOD_KEYS:
            column = replace(column, display=partial(method_name, conf=conf), dagger_key="tuned")
        columns.append(column)
    return columns


def for_readers(table: Table, labels: Sequence[str]) -> Table:
    """Return the table without redundant columns, and with a note on daggers, which mark fine-tuned methods, if any.

    A column is redundant if all its cells are equal and not measured, or if the first column of labels repeats it.

    Args:
        table: The table.
        labels: The keys of the columns that identify rows.
    """
    has_dagger = any(row.get(c.dagger_key) for c in table.columns if c.dagger_key for row in table.rows)
    return replace(drop_redundant(table, labels), notes=[*table.notes, *([TUNED_NOTE] if has_dagger else [])])


def drop_redundant(table: Table, labels: Sequence[str]) -> Table:
    """Return the table without redundant columns.

    A column with equal cells moves to the title, unless it has measured numbers.  A column of labels is dropped if in
    each row its words occur in the first column of labels.  A table of one row is returned unchanged.

    Args:
        table: The table.
        labels: The keys of the columns that identify rows.  The first one whose cells differ is kept, or the first
            one if none differs.
    """
    rows = table.rows
    if len(rows) < 2 or not table.columns:
        return table
    texts = {c.key: [format_cell(row.get(c.key), c) for row in rows] for c in table.columns}
    first_label = next((key for key in labels if len(set(texts[key])) > 1), labels[0] if labels else None)
    columns: list[Column] = []
    title = [table.title]
    for column in table.columns:
        key, cells = column.key, texts[column.key]
        is_label = key in labels
        if key == first_label:
            columns.append(column)
        elif len(set(cells)) > 1 or (not is_label and any(_is_measured(row.get(key)) for row in rows)):
            if not (is_label and first_label and all(map(_repeats, cells, texts[first_label]))):
                columns.append(column)
        elif cells[0] not in ("", "-"):  # "-": all cells lack a value
            separator = " = " if column.title == "n" else " " if is_label else ": "
            title.append(cells[0] if key in METHOD_KEYS else f"{column.title}{separator}{cells[0]}")
    return replace(table, columns=columns, title=", ".join(filter(None, title)))


def _is_measured(value: Any) -> bool:
    """Return whether a table's cell is a measured number: a float other than NaN, or a Spread of at least one value."""
    return bool(value.count) if isinstance(value, Spread) else isinstance(value, float) and not math.isnan(value)


def _repeats(text: str, label: str) -> bool:
    """Return whether all words of ``text`` occur in ``label``, in any order and in upper or lower case."""
    text_words, label_words = (set(re.findall(r"\w+(?:\.\d+)?", part.casefold())) for part in (text, label))
    return text_words <= label_words
