"""Several labels per picture in a table: lists in one column, or a column of 0 and 1 for each label."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedbench.core.options import require, require_distinct
from fedbench.data._names import check_spelling

log = logging.getLogger("fedbench.data")
SEPARATORS = "|;,"  # common separators in lists of labels
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}


def split_lists(
    values: Sequence[str], separator: str, names: list[str] | None, source: str
) -> tuple[list[str], np.ndarray]:
    """Parse cells that list labels.

    Args:
        values: The cells.  An empty cell lists no label.
        separator: Text between two labels.
        names: The labels to use; others are ignored.  None: all labels of the table, sorted.
        source: The table and column, for messages.

    Returns:
        The names of the labels in order, and rows of 0 and 1 [n, C] float32.
    """
    rows = [[label for part in value.split(separator) if (label := part.strip())] for value in values]
    counts = Counter(label for row in rows for label in row)
    check_spelling([*counts, *(names or ())], f"{source}: the label", are_labels=names is None)
    others = [] if names is None else sorted(set(counts) - set(names))
    names = sorted(counts) if names is None else names
    if others:
        log.info(
            "%s: labels that dataset.classes does not list are left out: %s",
            source,
            ", ".join(f"{label} ({counts[label]:,})" for label in others),
        )
    absent = [name for name in names if name not in counts]
    if absent:
        log.warning("%s: no picture has the label %s of dataset.classes", source, " or ".join(absent))
    require(len(absent) < len(names), f"{source} has no label of dataset.classes; it has {', '.join(others)}")
    number = {name: i for i, name in enumerate(names)}
    targets = np.zeros((len(rows), len(names)), np.float32)
    for target, row in zip(targets, rows, strict=True):
        target[[number[label] for label in row if label in number]] = 1
    return names, targets


def join_columns(columns: Sequence[Sequence[str]], names: Sequence[str], source: str) -> np.ndarray:
    """Return targets from a column of 0 and 1 for each label.

    They are classes [n] int64 if every row has exactly one 1, else rows of 0 and 1 [n, C] float32.
    """
    require_distinct(names, "dataset.columns.label")
    for name, cells in zip(names, columns, strict=True):
        odd = next((cell for cell in cells if cell.lower() not in FLAGS), None)
        require(odd is None, f"{source}: the label {name} is {odd} somewhere, expected 0 or 1")
    targets = np.array([[FLAGS[cell.lower()] for cell in cells] for cells in columns], np.float32).T  # [n, C]
    if (targets.sum(1) == 1).all():
        return targets.argmax(1).astype(np.int64)
    return np.ascontiguousarray(targets)


def refuse_lists(values: Sequence[str], source: str) -> None:
    """Refuse labels that list other labels, such as A|B, or A;B beside A and B: each list would become a class."""
    labels = set(values)
    for separator in SEPARATORS:
        several = [v for v in labels if separator in v]
        lists = sorted(v for v in several if separator == "|" or all(p.strip() in labels for p in v.split(separator)))
        require(
            not lists,
            f"{source} has the label {(lists or [''])[0]}, a list of labels: dataset.label_separator='{separator}' "
            "reads lists, and dataset.classes, naming all of them, takes each for one class",
        )
