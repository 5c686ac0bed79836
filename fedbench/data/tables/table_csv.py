"""A CSV file of the user: one row per sample, a label column, and features in the other columns.

Columns are numeric or categorical, and cells may be missing; `data/tables/_table.py` turns them into features.
With partition=domain, each value of the client column is a client.

Letters: n samples.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import error_prefix, listed, require, require_distinct
from fedbench.data._names import check_spelling, positions
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.tables._csv import Column, CsvTable, Decimal, ordered, split_codes
from fedbench.data.tables._table import Fill, Scale, ScaleFit, TableFit, warn_of_row_numbers

log = logging.getLogger(__name__)
ROLES = {"label": "label", "client": None, "patient": None, "split": None}  # default column of each role
MISSING = ("", "?", "na", "n/a", "nan", "null", "none")  # cells without a value, in lower case
FEW_TEXTS = 20  # distinct texts that a column may have in any number of rows


@dataclass
class TableCsv:
    """A table from a CSV file in UTF-8.  roles: the columns of label, client, patient and split; others are features.

    Args:
        path: The CSV file.
        delimiter: The character between cells, or a backslash and a t for a tab.
        columns: The columns of label, client, patient and split.  client, patient and split may be None: no natural
            clients, a different patient in each row, no published split.  split contains train, val or test.
        ignore: Columns that are not used.
        target: class (text or numbers) or number (a regression).
        classes: The classes in the order of their indices.  None: those in the table, sorted (by value if all are
            numbers).
        categorical: Categorical columns, or a mapping from them to their values; other values then belong to no
            category.  None: columns in which at least half of the cells are text.
        missing: Texts of cells without a value, in upper or lower case.  None: empty cells, ?, na, n/a, nan, null and
            none.
        indicator, scale_fit, scale, fill, constant: How cells become features; see `TableFit` in
            `data/tables/_table.py`.
        decimal: Whether numbers have a decimal point or a decimal comma.
    """

    path: str | None = None
    delimiter: str = ","
    columns: dict[str, str | None] | None = None
    ignore: list[str] | None = None
    target: Literal["class", "number"] = "class"
    classes: list | None = None
    categorical: list[str] | dict[str, list] | None = None
    missing: list[str] | None = None
    indicator: bool = False
    scale_fit: ScaleFit = "train"
    scale: Scale = "standard"
    fill: Fill = "mean"
    constant: bool = False
    decimal: Decimal = "point"

    def __post_init__(self) -> None:
        self.delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
        require(
            len(self.delimiter) == 1,
            f"dataset.delimiter={self.delimiter!r} is not one character: set it to a comma, a semicolon, or \\t for a "
            "tab",
        )
        self.roles = {**ROLES, **(self.columns or {})}
        unknown = sorted(set(self.roles) - set(ROLES))
        require(
            not unknown,
            f"dataset.columns has the keys {', '.join(unknown)}, but only {', '.join(ROLES)} are allowed: remove "
            "the others",
        )
        require(
            self.roles["label"] is not None,
            "dataset.columns.label is null, but a label is needed: set it to the name of the column of the labels",
        )
        require(
            self.target == "class" or self.classes is None,
            f"dataset.classes={self.classes} must be null with dataset.target=number, a regression without classes: "
            "set it to null, or dataset.target=class",
        )
        require_distinct(map(str, self.classes or ()), "dataset.classes")
        self._missing = {cell.lower() for cell in (MISSING if self.missing is None else self.missing)}

    def load(self) -> Arrays:
        """Return the raw columns of the file, with a `fit` that makes features of them.

        Raises:
            ConfigError: The file cannot be read, or does not fit the options.
        """
        require(
            self.path is not None, "dataset=table_csv needs a file, but dataset.path is null: set dataset.path to one"
        )
        table = CsvTable(Path(str(self.path)), "dataset=table_csv", self.delimiter)
        table.require_columns([name for name in self.roles.values() if name], "set their names in dataset.columns")
        table.require_columns(self.ignore or [], "correct dataset.ignore")
        table.require_columns(list(self.categorical or ()), "correct dataset.categorical")
        raw, counts = self._features(table)  # counts: the number of categories of each column, 0 for a numeric one
        class_names, targets = self._targets(table)
        client_names, clients = self._codes(table, "client")
        _, patients = self._codes(table, "patient")
        split_column = self._column(table, "split")
        split = np.full(len(table), TRAIN, np.int8)
        if split_column is not None:
            split = split_codes(split_column.require_values(), f"{table.path}: {split_column.name}")
        with error_prefix(f"{self.path}"):
            return Arrays(
                inputs=raw,
                targets=targets,
                split=split,
                num_classes=1 if class_names is None else len(class_names),
                task="regression" if class_names is None else "classification",
                class_names=class_names,
                domain=clients,
                domain_names=client_names,
                subject=patients,
                fit=TableFit(
                    categories=tuple(counts),
                    indicator=self.indicator,
                    scale_fit=self.scale_fit,
                    scale=self.scale,
                    fill=self.fill,
                    constant=self.constant,
                ),
            ).check()

    def _column(self, table: CsvTable, role: str) -> Column | None:
        """Return the column of the CSV file that has a role; None if the options name no column for it.

        Args:
            table: The CSV file.
            role: "label", "client", "patient" or "split".
        """
        name = self.roles[role]
        return None if name is None else Column(table, name, missing=self._missing, decimal=self.decimal)

    def _features(self, table: CsvTable) -> tuple[np.ndarray, list[int]]:
        """Return the feature columns, before `TableFit` fills, scales and encodes them.

        Returns:
            Numbers or indices of categories, [n, columns] float64, NaN for a missing value.  And the number of
            categories of each column, 0 for a numeric one.
        """
        names = [name for name in table.header if name not in (*self.roles.values(), *(self.ignore or ()))]
        unused = [name for name in self.categorical or () if name not in names]
        require(
            not unused, f"dataset.categorical names {', '.join(unused)}, which are not features: remove them from it"
        )
        require(
            bool(names),
            f"{table.path} has no feature columns, because dataset.columns and dataset.ignore name all its columns: "
            "remove a name, or add a column to the file",
        )
        raw, counts = [], []
        for name in names:
            column = Column(table, name, missing=self._missing, decimal=self.decimal)
            categories = self._categories(column)
            if categories is None:
                raw.append(column.numbers())
                advice = f"\"dataset.ignore=['{name}']\" excludes it"
                warn_of_row_numbers(raw[-1], f"{table.path}: column {name!r}", advice)
                counts.append(0)
            else:
                raw.append(column.codes(categories))
                counts.append(max(1, len(categories)))  # 0 would mean a numeric column
        shown = [f"{name} ({count})" for name, count in zip(names, counts) if count]
        log.info(
            "%s: %d rows, %d numeric columns, %d categorical columns: %s",
            table.path, len(table), len(names) - len(shown), len(shown), ", ".join(shown) or "none",
        )  # fmt: skip
        return np.stack(raw, axis=1), counts

    def _categories(self, column: Column) -> list[str] | None:
        """Return the categories of a feature column, in the order of their indices.

        Args:
            column: The column.

        Returns:
            The values that dataset.categorical lists for the column, or else its distinct values, sorted.  None: the
            column is numeric.
        """
        if self.categorical is None:
            return None if column.is_numeric else self._detected_categories(column)
        if column.name not in self.categorical:
            return None
        if not isinstance(self.categorical, dict):
            return column.categories()
        categories = [str(value) for value in self.categorical[column.name]]
        others = [value for value in column.present if value not in categories]
        if others:
            log.warning(
                "%s: %d cells of column %s, such as %r, are not in dataset.categorical and belong to no category",
                column.path, len(others), column.name, others[0],
            )  # fmt: skip
        return categories

    def _detected_categories(self, column: Column) -> list[str]:
        """Return the sorted categories of a column of text that dataset.categorical does not mention.

        There may be half as many as rows, or FEW_TEXTS (20) if that is more.

        Raises:
            ConfigError: There are too many for the number of rows, or most values are numbers with the other decimal
                mark.
        """
        column.refuse_other_decimals()
        categories = column.categories()
        count, rows = len(categories), len(column.cells)
        require(
            count <= max(FEW_TEXTS, rows // 2),
            f"{column.path}: column {column.name} has {count:,} distinct texts in {rows:,} rows, too many for "
            "categories: add it to dataset.ignore or dataset.categorical, or correct its text if it is numeric "
            f"({column.first_text()})",
        )
        if count > FEW_TEXTS:
            log.warning(
                "%s: column %s has %d distinct texts, such as %s, and becomes as many features: confirm it in "
                "dataset.categorical, or exclude it by dataset.ignore",
                column.path, column.name, count, column.first_text(),
            )  # fmt: skip
        return categories

    def _targets(self, table: CsvTable) -> tuple[list[str] | None, np.ndarray]:
        """Return the names of the classes and the targets of the rows.

        Returns:
            Names, and classes [n] int64.  For a regression (the option target is "number"), None and numbers [n]
            float32.
        """
        column = Column(table, str(self.roles["label"]), missing=self._missing, decimal=self.decimal)
        cells = column.require_values()
        if self.target == "number":
            return None, column.numbers().astype(np.float32)
        where = f"{table.path}: column {column.name}"
        if self.classes is not None:
            names = [str(name) for name in self.classes]
            check_spelling(names, "dataset.classes")
        else:
            names = ordered(cells)
            check_spelling(names, where, are_labels=True)
            # numbers are classes if there are at most half as many as rows, or FEW_TEXTS (20)
            require(
                2 * len(names) <= max(len(cells), 2 * FEW_TEXTS) or not column.is_numeric,
                f"{where} has {len(names):,} distinct numbers in {len(cells):,} rows: set dataset.target=number for "
                "a regression, or list the classes in dataset.classes",
            )
        unknown = sorted(set(cells) - set(names))
        require(not unknown, f"{where} has labels that are not in dataset.classes: {listed(unknown)}; add them to it")
        return names, positions(cells, names)

    def _codes(self, table: CsvTable, role: str) -> tuple[list[str] | None, np.ndarray | None]:
        """Return the names in the column of a role, and the index of each row's name.

        Args:
            table: The file.
            role: "client" or "patient".

        Returns:
            The sorted names, and indices [n] int64.  Both are None if dataset.columns has no column for the role.
        """
        column = self._column(table, role)
        if column is None:
            return None, None
        cells, names = column.require_values(), column.categories()
        return names, positions(cells, names)
