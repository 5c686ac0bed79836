"""A CSV file of one's own: a row per sample, a column for the label, the others are features.

Numbers and categories, missing values, natural clients; what becomes of them is in data/tables/_table.py.  With
partition=domain every client of the client column is one of the federation's.

Letters: n samples.
"""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedbench.core.options import ConfigError, require, require_distinct
from fedbench.data._foreign import refuse_foreign
from fedbench.data._names import NUMBER, check_spelling
from fedbench.data.base import PARTS, TRAIN, Arrays
from fedbench.data.tables._table import Scale, ScaleFit, TableFit, warn_of_row_numbers

if TYPE_CHECKING:
    from pandas import Series

log = logging.getLogger(__name__)
COLUMNS = {"label": "label", "client": None, "patient": None, "split": None}
MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
FEW = 20  # different texts that a column may hold, however few rows there are
SHOWN = 3
DELIMITERS = (",", ";", "\t", "|")  # of CSV files, the most common first
Decimal = Literal["point", "comma"]


class TableCsv:
    """A table from a CSV file in UTF-8, whose first line names the columns.

    Args:
        path: The CSV file.
        delimiter: Text between cells.  A tab may be written as a backslash and a t.
        decimal: Whether numbers have a decimal point or a decimal comma.
        columns: Names of the columns for label, client, patient and split.  client may be None (no natural clients),
            and so may patient (each row is of another patient) and split.  split holds train, val or test, for
            dataset.split=published.
        ignore: Columns that are not used.
        target: class (text or numbers) or number (a regression).
        classes: Classes in the order of their numbers.  None: those in the table, sorted (by value if all are numbers).
        categorical: Columns of categories, or a mapping from them to their values; other values then belong to no
            category.  None: columns in which at least half of the cells are text.  Other columns with text are refused.
        missing: Cells without a value, in any case.
        indicator, scale_fit, scale, fill, constant: See data/tables/_table.py, which also has the rules.
    """

    def __init__(
        self,
        path: str | None = None,
        delimiter: str = ",",
        columns: dict[str, str | None] | None = None,
        ignore: list[str] | None = None,
        target: Literal["class", "number"] = "class",
        classes: list | None = None,
        categorical: list[str] | dict[str, list] | None = None,
        missing: list[str] | None = None,
        indicator: bool = False,
        scale_fit: ScaleFit = "train",
        scale: Scale = "standard",
        fill: Literal["mean", "zero"] = "mean",
        constant: bool = False,
        decimal: Decimal = "point",
    ):
        self.path, self.ignore = path, list(ignore or ())
        self.delimiter = "\t" if delimiter == "\\t" else delimiter
        self.decimal: Decimal = decimal
        self.columns = {**COLUMNS, **(columns or {})}
        odd = sorted(set(self.columns) - set(COLUMNS))
        require(not odd, f"dataset.columns knows {', '.join(COLUMNS)}, not {', '.join(odd)}")
        require(self.columns["label"] is not None, "dataset.columns.label must name a column")
        require(
            len(self.delimiter) == 1, f"dataset.delimiter must be one character, or \\t for a tab, got {delimiter!r}"
        )
        require(
            target == "class" or classes is None, "dataset.classes is for dataset.target=class, and this is a number"
        )
        self.target, self.classes = target, None if classes is None else [str(c) for c in classes]
        require_distinct(self.classes or (), "dataset.classes")
        self.categorical = categorical
        self.missing = {m.lower() for m in (MISSING if missing is None else missing)}
        self.indicator = indicator
        self.scale_fit: ScaleFit = scale_fit
        self.scale: Scale = scale
        self.fill: Literal["mean", "zero"] = fill
        self.constant = constant

    def load(self) -> Arrays:
        """Read the file; ConfigError with one sentence about the first thing that is wrong."""
        require(self.path is not None, "dataset=table_csv needs dataset.path=<a CSV file>")
        table = Table(Path(str(self.path)), self.delimiter, self.missing, self.decimal)
        table.require_columns([c for c in self.columns.values() if c], "dataset.columns says which is which")
        table.require_columns(self.ignore, "dataset.ignore")
        table.require_columns(list(self.categorical or ()), "dataset.categorical")
        raw, counts = self._features(table)
        label = str(self.columns["label"])
        names, targets = self._targets(table, label)
        client_names, client = self._named(table, "client")
        try:
            return Arrays(
                inputs=raw,
                targets=targets,
                split=self._parts(table),
                num_classes=1 if names is None else len(names),
                task="regression" if names is None else "classification",
                class_names=names,
                domain=client,
                domain_names=client_names,
                subject=self._named(table, "patient")[1],
                fit=TableFit(tuple(counts), self.indicator, self.scale_fit, self.scale, self.fill, self.constant),
            ).check()
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def _features(self, table: Table) -> tuple[np.ndarray, list[int]]:
        """Raw columns [n, columns] float64, and how many categories each has (0: it is numeric)."""
        used = [c for c in table.header if c not in (*self.columns.values(), *self.ignore)]
        taken = [c for c in self.categorical or () if c not in used]
        require(not taken, f"dataset.categorical names {', '.join(taken)}, which is no feature")
        require(bool(used), f"{table.path} has no column beside those that dataset.columns and dataset.ignore name")
        columns, counts = [], []
        for name in used:
            values = self._categories(table, name)
            columns.append(table.numbers(name) if values is None else table.codes(name, values))
            if values is None:
                warn_of_row_numbers(
                    columns[-1], f"{table.path}: column {name!r}", f"\"dataset.ignore=['{name}']\" leaves it out"
                )
            counts.append(0 if values is None else max(1, len(values)))
        found = [f"{name} ({count})" for name, count in zip(used, counts) if count]
        log.info("%s: %d rows, %d numeric columns, %d of categories%s", table.path, len(table), len(used) - len(found),
                 len(found), f": {', '.join(found)}" if found else "")  # fmt: skip
        return np.stack(columns, axis=1), counts

    def _categories(self, table: Table, name: str) -> list[str] | None:
        """The values of a column of categories, in order; None where it is numeric."""
        if isinstance(self.categorical, dict) and name in self.categorical:
            values = [str(v) for v in self.categorical[name]]
            other = [cell for cell in table.present(name) if cell not in values]
            if other:
                log.warning("%s: %d cells of column %s, such as %r, are not among the values that dataset.categorical "
                            "lists, and count as none of them", table.path, len(other), name, other[0])  # fmt: skip
            return values
        if self.categorical is None and table.is_numeric(name):
            table.require_numbers(name)
            return None
        if self.categorical is not None and name not in self.categorical:
            return None
        values = table.names(name)
        if self.categorical is None:
            table.refuse_other_decimals(name)
        if self.categorical is None and FEW < len(values) <= len(table) // 2:
            log.warning("%s: column %s holds %d different texts, such as %s, and becomes as many features: "
                        "dataset.categorical says so on purpose, dataset.ignore leaves it out",
                        table.path, name, len(values), table.first_text(name))  # fmt: skip
        if self.categorical is None and len(values) > max(FEW, len(table) // 2):
            raise ConfigError(
                f"{table.path}: column {name} holds {len(values):,} different texts in {len(table):,} rows, too many "
                "for categories: leave it out (dataset.ignore), list it in dataset.categorical, or, if it should be "
                f"numeric, look at {table.first_text(name)}"
            )
        return values

    def _targets(self, table: Table, name: str) -> tuple[list[str] | None, np.ndarray]:
        """Class names and each row's class [n] int64; of a regression None and the numbers [n] float32."""
        cells = table.all_present(name)
        if self.target == "number":
            return None, table.numbers(name).astype(np.float32)
        names = ordered(cells) if self.classes is None else self.classes
        where = f"{table.path}: column {name}" if self.classes is None else "dataset.classes"
        check_spelling(names, where, are_labels=self.classes is None)
        known = set(names)
        odd = next((c for c in cells if c not in known), None)
        require(odd is None, f"{table.path} has the label {odd}, which is not in dataset.classes: {', '.join(names)}")
        require(
            self.classes is not None or 2 * len(names) <= max(len(cells), 2 * FEW) or not table.is_numeric(name),
            f"{table.path}: column {name} holds {len(names):,} different numbers in {len(cells):,} rows: a regression "
            "is dataset.target=number",
        )
        number = {c: i for i, c in enumerate(names)}
        return names, np.array([number[c] for c in cells], np.int64)

    def _named(self, table: Table, what: str) -> tuple[list[str] | None, np.ndarray | None]:
        """The names in the client or patient column, sorted, and each row's number [n] int64; None without one."""
        column = self.columns[what]
        if column is None:
            return None, None
        cells, names = table.all_present(column), table.names(column)
        number = {c: i for i, c in enumerate(names)}
        return names, np.array([number[c] for c in cells], np.int64)

    def _parts(self, table: Table) -> np.ndarray:
        """The published part of each row, [n] int8; all train where no column says."""
        column = self.columns["split"]
        if column is None:
            return np.full(len(table), TRAIN, np.int8)
        cells = [c.lower() for c in table.all_present(column)]
        odd = next((c for c in cells if c not in PARTS), None)
        require(odd is None, f"{table.path}: {column} is {odd}, not train, val or test")
        return np.array([PARTS[c] for c in cells], np.int8)


class Table:
    """The cells of a CSV file, stripped of blanks, as a data frame whose index is the line in the file.

    Args:
        path: The file, in UTF-8.
        delimiter: Text between cells.
        missing: Texts in small letters that stand for no value.
        decimal: Whether numbers have a decimal point or a decimal comma.
    """

    def __init__(self, path: Path, delimiter: str, missing: set[str], decimal: Decimal = "point"):
        self.path, self.delimiter = path, delimiter
        self.decimal: Decimal = decimal
        refuse_foreign(path, "dataset=table_csv")
        require(path.is_file(), f"{path} is no file: dataset.path names a CSV file with a row per sample")
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("dataset=table_csv needs pandas: pip install pandas") from error
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                self.first_line = file.readline()
                file.seek(0)
                reader = csv.reader(file, delimiter=delimiter)
                self.header = [name.strip() for name in next(reader, [])]
                rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path} cannot be read as a CSV file ({error})") from error
        lines = {line: row for line, row in rows if any(row)}
        self._check(lines)
        self.cells = pd.DataFrame.from_dict(lines, orient="index", columns=self.header, dtype=object)
        self.values = self.cells.mask(
            self.cells.apply(lambda column: column.str.lower()).isin(sorted(missing))
        )  # NaN: none

    def __len__(self) -> int:
        return len(self.cells)

    def _check(self, lines: dict[int, list[str]]) -> None:
        require(bool(lines), f"{self.path} holds no row beside the line that names the columns")
        twice = next((name for name in self.header if self.header.count(name) > 1), None)
        require(twice is None, f"{self.path} has two columns called {twice!r}")
        odd = next((line for line, row in lines.items() if len(row) != len(self.header)), None)
        if odd is not None:
            raise ConfigError(
                f"{self.path}, line {odd}: {len(lines[odd])} cells for {len(self.header)} columns "
                f"({self._other_delimiter() or 'dataset.delimiter says what is between cells'})"
            )

    def require_columns(self, names: list[str], key: str) -> None:
        """Refuse names that are no columns; key: who says them."""
        absent = [name for name in names if name not in self.header]
        listed = ", ".join(self.header[:12]) + (", ..." if len(self.header) > 12 else "")
        require(
            not absent,
            f"{self.path} has no column {' or '.join(absent)}; its columns are {listed} "
            f"({self._other_delimiter() or key})",
        )

    def _other_delimiter(self) -> str:
        """Name another delimiter that cuts the first line into more cells, if there is one."""
        best = best_delimiter(self.first_line)
        found = len(next(csv.reader([self.first_line], delimiter=best), []))
        return "" if found <= len(self.header) else f'cells are separated by {best!r}: "dataset.delimiter={best!r}"'

    def present(self, name: str) -> list[str]:
        """Return the cells of a column that have a value."""
        return self.values[name].dropna().tolist()

    def all_present(self, name: str) -> list[str]:
        """Return all cells of a column [n]; ConfigError where one has no value."""
        absent = self.cells.loc[self.values[name].isna(), name]
        if len(absent):
            raise ConfigError(f"{self.path}, line {absent.index[0]}: {name} is {absent.iloc[0]!r}, which is no value")
        return self.cells[name].tolist()

    def names(self, name: str) -> list[str]:
        """Return the distinct values of a column of names, in order; ConfigError if a number has two spellings."""
        found = self.present(name)
        check_spelling(found, f"{self.path}: column {name}")
        return ordered(found)

    def is_numeric(self, name: str) -> bool:
        """Return whether more than half of the values of a column are numbers, or it has no values."""
        return len(self._texts(name)) * 2 < max(1, len(self.present(name)))

    def _texts(self, name: str, decimal: Decimal | None = None) -> Series:
        """Return the values of a column that are not numbers."""
        odd = [isinstance(cell, str) and number_in(cell, decimal or self.decimal) is None for cell in self.values[name]]
        return self.values.loc[odd, name]

    def first_text(self, name: str) -> str:
        """Return the location of the first value of a column that is not a number."""
        return _located(self._texts(name))[0]

    def require_numbers(self, name: str) -> None:
        """Refuse text in a column of numbers."""
        odd, count = self._texts(name), len(self.present(name))
        if len(odd):
            shown = "; ".join(_located(odd)[:SHOWN]) + ("; ..." if len(odd) > SHOWN else "")
            raise ConfigError(
                f"{self.path}: {count - len(odd):,} of the {count:,} values of column {name} are numbers, and "
                f"{len(odd):,} not ({shown}): add them to dataset.missing if they stand for no value, or list the "
                "columns of categories in dataset.categorical"
            )

    def refuse_other_decimals(self, name: str) -> None:
        """Refuse a column of text that would be numeric with the other decimal mark."""
        other: Decimal = "comma" if self.decimal == "point" else "point"
        if len(self._texts(name, other)) * 2 < len(self.present(name)):
            raise ConfigError(
                f"{self.path}: column {name} has numbers with a {other}, as in {self.first_text(name)}: "
                f"dataset.decimal={other} if it is the decimal mark; leave it out where it separates thousands"
            )

    def numbers(self, name: str) -> np.ndarray:
        """Return a numeric column, NaN where a value is missing; ConfigError for text.  # [n] float64"""
        odd = self._texts(name)
        if len(odd):
            self.refuse_other_decimals(name)
            raise ConfigError(
                f"{self.path}, line {odd.index[0]}: {name} is {odd.iloc[0]!r}, no number: name the column in "
                "dataset.categorical, or the cell in dataset.missing"
            )
        return self.values[name].map(lambda cell: number_in(cell, self.decimal), na_action="ignore").to_numpy(float)

    def codes(self, name: str, values: list[str]) -> np.ndarray:
        """Return each cell's position among the values, their count for another value, NaN for none.  # [n] float64"""
        number = {value: float(i) for i, value in enumerate(values)}
        return self.values[name].map(lambda c: number.get(c, float(len(values))), na_action="ignore").to_numpy(float)


def _located(cells: Series) -> list[str]:
    return [f"line {line}, {cell!r}" for line, cell in cells.items()]


def best_delimiter(line: str) -> str:
    """Return the delimiter that cuts a line into the most cells."""
    return max(DELIMITERS, key=lambda d: len(next(csv.reader([line], delimiter=d), [])))


def number_in(cell: str, decimal: Decimal = "point") -> float | None:
    """Return the finite number in a cell, if it holds one; ``inf``, ``nan`` and ``1_000`` do not count."""
    if decimal == "comma":
        cell = cell.translate({ord(","): ".", ord("."): ","})
    if not NUMBER.fullmatch(cell):
        return None
    value = float(cell)
    return value if math.isfinite(value) else None


def ordered(cells: list[str]) -> list[str]:
    """The different cells, by value where all are numbers, else by text."""
    different = sorted(set(cells))
    numbers = [number_in(cell) for cell in different]
    if any(number is None for number in numbers):
        return different
    return [cell for _, cell in sorted(zip(numbers, different))]  # type: ignore[type-var]
