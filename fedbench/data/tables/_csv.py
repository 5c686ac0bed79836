"""Read CSV files whose first line names the columns."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, listed, require
from fedbench.data._foreign import refuse_foreign
from fedbench.data._names import NUMBER, check_spelling
from fedbench.data.base import PARTS

DELIMITERS = (",", ";", "\t", "|")  # the most common first
SHOWN = 3  # cells in a message
SWAP_MARKS = str.maketrans(",.", ".,")
Decimal = Literal["point", "comma"]


class CsvTable:
    """The cells of a CSV file in UTF-8, without surrounding blanks.  Empty rows are skipped.

    Args:
        path: The file.
        source: The data set that reads it, as in "dataset=table_csv", for error messages.
        delimiter: The character between cells.

    Attributes:
        header: The column names.
        lines: The line number of each row [n].
        columns: The cells [n] of each column.

    Raises:
        ConfigError: The file cannot be read, has no rows, or has rows of different lengths.
    """

    def __init__(self, path: Path, source: str, delimiter: str = ","):
        self.path = path
        refuse_foreign(path, source)  # such as a Parquet file, which the error names
        require(path.is_file(), f"{path} does not exist or is a folder: set dataset.path to a CSV file")
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                self.first_line = file.readline()
                file.seek(0)
                reader = csv.reader(file, delimiter=delimiter)
                self.header = [name.strip() for name in next(reader, [])]
                rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(
                f"{path} cannot be read as a CSV file in UTF-8 ({error}): save it in this form"
            ) from error
        rows = [(line, row) for line, row in rows if any(row)]
        require(bool(rows), f"{path} has no rows below the line of column names: add one row for each sample")
        duplicate = next((name for name in self.header if self.header.count(name) > 1), None)
        require(duplicate is None, f"{path} has two columns called {duplicate!r}: rename one of them")
        for line, row in rows:
            if len(row) != len(self.header):
                advice = self._delimiter_advice() or "quote cells that contain the delimiter"
                raise ConfigError(
                    f"{path}, line {line} has {len(row)} cells, but the first line names {len(self.header)} columns: "
                    f"{advice}"
                )
        self.lines = [line for line, _ in rows]
        self.columns = {name: [row[i] for _, row in rows] for i, name in enumerate(self.header)}

    def __len__(self) -> int:
        return len(self.lines)

    def require_columns(self, names: Sequence[str], advice: str) -> None:
        """Check that columns exist.

        Args:
            names: The names of the columns.
            advice: What the user can do if one does not exist, for the message, as in "correct dataset.ignore".

        Raises:
            ConfigError: A column does not exist.
        """
        absent = [name for name in names if name not in self.columns]
        require(
            not absent,
            f"{self.path} has no column {' or '.join(absent)}; its columns are {listed(self.header)}: "
            f"{self._delimiter_advice() or advice}",
        )

    def _delimiter_advice(self) -> str:
        """Return advice for a message: the delimiter that gives more cells in the first line, or "" if none does."""
        counts = {mark: len(next(csv.reader([self.first_line], delimiter=mark), [])) for mark in DELIMITERS}
        best = max(DELIMITERS, key=counts.__getitem__)
        if counts[best] <= len(self.header):
            return ""
        return f'set "dataset.delimiter={best!r}", which separates its cells'


class Column:
    """A column of a CSV file.

    Args:
        table: The file.
        name: The name of the column.
        missing: Cells without a value, in lower case.
        decimal: "point" or "comma", the decimal separator of numbers.

    Attributes:
        cells: All cells [n].
        values: The cells [n], or None for cells without a value.
        present: The cells with a value.
        texts: Line number and cell of each value that is not a number.
    """

    def __init__(self, table: CsvTable, name: str, missing: Collection[str], decimal: Decimal = "point"):
        self.name = name
        self.path = table.path
        self.lines = table.lines
        self.decimal: Decimal = decimal
        self.cells = table.columns[name]
        self.values = [None if cell.lower() in missing else cell for cell in self.cells]
        self.present = [value for value in self.values if value is not None]
        self.texts = self._not_numbers(decimal)

    @property
    def is_numeric(self) -> bool:
        """Whether more than half of the cells that are not missing are numbers.  True if all cells are missing."""
        return len(self.texts) * 2 < max(1, len(self.present))

    def first_text(self) -> str:
        """Return the first value that is not a number, with its line: "line 4, 'high'".  There must be one."""
        return _located(*self.texts[0])

    def require_values(self) -> list[str]:
        """Return all cells [n] as text; raise ConfigError if one of them counts as a missing value."""
        for line, cell, value in zip(self.lines, self.cells, self.values, strict=True):
            require(
                value is not None,
                f"{self.path}, line {line}: {self.name} is {cell!r}, expected a value: fill the cell or remove "
                "the line",
            )
        return self.cells

    def categories(self) -> list[str]:
        """Return the sorted distinct values, without missing ones.

        Raise ConfigError if a number has two spellings, such as 1 and 1.0.
        """
        check_spelling(self.present, f"{self.path}: column {self.name}")
        return ordered(self.present)

    def codes(self, categories: Sequence[str]) -> np.ndarray:
        """Return the index of each cell in a list of C categories.

        Returns:
            Indices, [n] float64: NaN for a cell without a value, C for a value that is not in the list.
        """
        index = {category: float(i) for i, category in enumerate(categories)}
        other = float(len(categories))
        return np.array([np.nan if value is None else index.get(value, other) for value in self.values])

    def numbers(self) -> np.ndarray:
        """Return the numbers in the column, NaN for cells without a value.  # [n] float64

        Raises:
            ConfigError: A value is text, or has the decimal mark that dataset.decimal does not name.
        """
        if self.texts:
            self.refuse_other_decimals()
            # texts: pairs of line number and cell; at most SHOWN (3) are shown
            shown = "; ".join(_located(*text) for text in self.texts[:SHOWN]) + ("; ..." * (len(self.texts) > SHOWN))
            raise ConfigError(
                f"{self.path}: {len(self.present) - len(self.texts):,} of the {len(self.present):,} values of column "
                f"{self.name} are numbers, {len(self.texts):,} not ({shown}): correct these cells, add words for a "
                "missing value to dataset.missing, or add a column of categories to dataset.categorical"
            )
        numbers = [None if value is None else number_in(value, self.decimal) for value in self.values]
        return np.array(numbers, np.float64)

    def refuse_other_decimals(self) -> None:
        """Raise ConfigError if most values, and more than with dataset.decimal, are numbers with the other mark.

        The marks are the decimal point and the decimal comma.
        """
        other: Decimal = "comma" if self.decimal == "point" else "point"
        # texts: values that are no numbers with this mark; present: all values of the column
        if len(self._not_numbers(other)) < min(len(self.texts), len(self.present) / 2):
            raise ConfigError(
                f"{self.path}: column {self.name} has numbers with a {other}, as in {self.first_text()}: set "
                f"dataset.decimal={other} if it is the decimal mark, or remove it if it separates thousands"
            )

    def _not_numbers(self, decimal: Decimal) -> list[tuple[int, str]]:
        """Return (line number, cell) of each value that is no number with the decimal mark "point" or "comma"."""
        pairs = zip(self.lines, self.values, strict=True)
        return [(line, value) for line, value in pairs if value is not None and number_in(value, decimal) is None]


def _located(line: int, cell: str) -> str:
    return f"line {line}, {cell!r}"


def number_in(cell: str, decimal: Decimal = "point") -> float | None:
    """Return the number in a cell of text, or None if the cell is no finite number.

    Spellings that only Python knows, such as ``inf``, ``nan`` and ``1_000``, are no numbers.

    Args:
        cell: The text.
        decimal: The decimal mark; the other mark separates nothing, so that a cell with it is no number.
    """
    if decimal == "comma":
        cell = cell.translate(SWAP_MARKS)
    value = float(cell) if NUMBER.fullmatch(cell) else math.inf
    return value if math.isfinite(value) else None


def ordered(cells: Collection[str]) -> list[str]:
    """Return the distinct cells as text, sorted by value if all are numbers, else alphabetically."""
    distinct = sorted(set(cells))
    numbers = [number_in(cell) for cell in distinct]
    if any(number is None for number in numbers):
        return distinct
    return [cell for _, cell in sorted(zip(numbers, distinct))]  # type: ignore[type-var]


def split_codes(cells: Sequence[str], where: str) -> np.ndarray:
    """Return the codes TRAIN, VAL and TEST of cells "train", "val" and "test", in upper or lower case.  # [n] int8

    Args:
        cells: The cells, [n].
        where: File and column, for the error message.

    Raises:
        ConfigError: A cell has another value.
    """
    unknown = next((cell for cell in cells if cell.lower() not in PARTS), None)
    require(unknown is None, f"{where} is {unknown!r}, expected train, val or test: correct the cell")
    return np.array([PARTS[cell.lower()] for cell in cells], np.int8)
