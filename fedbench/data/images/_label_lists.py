"""Multiple labels per picture in a table: lists in one column, or a column of 0 and 1 for each label."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedbench.core.options import require, require_distinct
from fedbench.data._names import check_spelling

log = logging.getLogger("fedbench.data")
SEPARATORS = "|;,"  # common separators in lists of labels
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}  # cells of a column for one label


def split_lists(
    cells: Sequence[str], separator: str, names: list[str] | None, source: str
) -> tuple[list[str], np.ndarray]:
    """Return multi-hot targets from cells that list labels, such as "A|C".

    Args:
        cells: The cells, [n].  An empty cell lists no label.
        separator: Text between two labels.
        names: The labels to use; others are ignored.  None: all labels of the table, sorted.
        source: The table, for messages.

    Returns:
        The names of the labels in the order of the columns, and multi-hot targets [n, C] float32.

    Raises:
        ConfigError: A label has two spellings, or no cell has a label of `names`.
    """
    rows = [{label.strip() for label in cell.split(separator)} - {""} for cell in cells]  # labels of each cell
    counts = Counter(label for row in rows for label in row)
    check_spelling([*counts, *(names or ())], f"{source}: the label", are_labels=names is None)
    if names is None:
        names = sorted(counts)
    ignored = [f"{label} ({counts[label]:,})" for label in sorted(set(counts) - set(names))]
    if ignored:
        log.info("%s: labels that are not in dataset.classes are ignored: %s", source, ", ".join(ignored))
    absent = [name for name in names if name not in counts]
    if absent:
        log.warning("%s: no picture has the label %s of dataset.classes", source, " or ".join(absent))
    require(
        len(absent) < len(names),
        f"{source} has no label of dataset.classes; its labels are {', '.join(ignored)}: list them in dataset.classes, "
        f"or correct dataset.label_separator={separator!r}, the text between two labels",
    )
    return names, np.array([[name in row for name in names] for row in rows], np.float32)


def join_columns(columns: Sequence[Sequence[str]], names: Sequence[str], source: str) -> np.ndarray:
    """Return targets from a column of 0 and 1 for each label.

    Args:
        columns: The cells, a list of n for each of the C columns.
        names: The names of the columns, which are those of the labels.
        source: The table, for messages.

    Returns:
        Classes [n] int64 if every row has exactly one 1, else multi-hot targets [n, C] float32.

    Raises:
        ConfigError: A cell is neither 0 nor 1.
    """
    require_distinct(names, "dataset.columns.label")
    for name, cells in zip(names, columns, strict=True):
        wrong = next((cell for cell in cells if cell.lower() not in FLAGS), None)  # FLAGS: "0", "1", "true", "0.0" ...
        require(
            wrong is None,
            f"{source}: column {name} contains {wrong}, expected 0 or 1: correct the cell, or remove the column from "
            "dataset.columns.label",
        )
    targets = np.array([[FLAGS[cell.lower()] for cell in cells] for cells in columns], np.float32).T  # [n, C]
    if (targets.sum(1) == 1).all():
        return targets.argmax(1).astype(np.int64)
    return np.ascontiguousarray(targets)


def refuse_lists(cells: Sequence[str], source: str) -> None:
    """Raise ConfigError if cells list labels, because each list would become a class.

    A label with | is a list.  A label with ; or , is one if its parts are labels of other cells.

    Args:
        cells: The labels, one for each picture.
        source: The table, for messages.
    """
    labels = set(cells)
    for separator in SEPARATORS:  # | ; and ,
        for label in sorted(label for label in labels if separator in label):
            is_list = separator == "|" or all(part.strip() in labels for part in label.split(separator))
            require(
                not is_list,
                f"{source} has the label {label}, a list of labels: set dataset.label_separator='{separator}' to read "
                "lists, or name all labels in dataset.classes to make each list a class",
            )
