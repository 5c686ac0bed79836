"""CSV files of a run: appended to every round, truncated when a run resumes."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.digests import Running, mark_of
from fedbench.core.files import replace_text

ROWS = 10_000  # lines written at a time


class CsvTable:
    """A CSV file to which lines are appended.  The first line determines the columns; the first column is ``round``.

    Opening an existing file removes lines of later rounds, and an incomplete last line.

    Args:
        path: The file.
        last_round: The last round to keep.  Negative: remove all lines.
    """

    def __init__(self, path: Path, last_round: int) -> None:
        self.path = path
        self.columns = truncate_rounds(path, last_round)
        self.written = Running(*mark_of(path))
        self._file = path.open("ab")

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write lines and flush.

        Args:
            rows: The lines, each a dict from column to value.  A missing column is left empty.

        Raises:
            ValueError: A line has an unknown column.
        """
        for row in rows:
            self._check_columns(row)
            self._write([",".join(csv_text(row.get(name)) for name in self.columns) + "\n"])
        self._file.flush()

    def extend(self, columns: Mapping[str, np.ndarray]) -> None:
        """Write n lines given by their columns, and flush.  Faster than `append` for many lines.

        Args:
            columns: From the name of a column to its values [n].  A missing column is left empty.

        Raises:
            ValueError: A column is unknown.
        """
        self._check_columns(columns)
        count = len(next(iter(columns.values())))
        texts = [_texts(columns[name]) if name in columns else repeat("", count) for name in self.columns]
        self._write(",".join(row) + "\n" for row in zip(*texts, strict=True))
        self._file.flush()

    def _write(self, lines: Iterable[str]) -> None:
        """Append lines, each of which ends with a line break, and update the file's size and checksum in `written`."""
        unwritten = iter(lines)
        while data := "".join(islice(unwritten, ROWS)).encode():
            self._file.write(data)
            self.written.add(data)

    def _check_columns(self, names: Iterable[str]) -> None:
        """Write the first line if the file is new, and check that later lines have no other columns.

        Args:
            names: The columns of a line.

        Raises:
            ValueError: The file does not have one of the columns.
        """
        if not self.columns:
            self.columns = list(names)
            self._write([",".join(self.columns) + "\n"])
        unknown = ", ".join(name for name in names if name not in self.columns)
        if unknown:
            raise ValueError(
                f"{self.path.name} has no column {unknown}; its columns are those of the first line that was written, "
                f"{', '.join(self.columns)}: give this column in the first line too"
            )

    def sync(self) -> None:
        """Wait until the system has written all lines to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _texts(values: np.ndarray) -> Iterable[str]:
    """Return the values [n] of a column as texts for a CSV file.

    Floats have the fewest digits that identify them, strings are quoted if necessary, and other types become integers.
    """
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return map(repr, array.tolist())
    if array.dtype.kind == "U":
        return map(quoted, array.tolist())
    return map(str, array.astype(np.int64).tolist())


def csv_text(value: Any) -> str:
    """Return a value as the text of a CSV cell.

    Args:
        value: None gives "".  A float has the shortest exact digits ("nan" for NaN), and a Boolean is 1 or 0.  Other
            numbers become integers, and a str is quoted if it has commas or quotes.
    """
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    return quoted(value) if isinstance(value, str) else str(int(value))


def quoted(text: str) -> str:
    """Return a text as a CSV cell: in quotes if it has commas or quotes, else unchanged.

    The text must not have line breaks.
    """
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def truncate_bytes(path: Path, size: int) -> None:
    """Shorten a file to its first ``size`` bytes, if it is longer.

    Size 0 removes the file, which may be missing then.  For other sizes, a missing file raises FileNotFoundError.
    """
    if size == 0:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > size:
        os.truncate(path, size)


def truncate_rounds(path: Path, last_round: int) -> list[str]:
    """Remove the lines of rounds after last_round from a CSV file, and return its columns.

    Args:
        path: The file.
        last_round: The last round to keep.  Negative: remove the file.

    Returns:
        The columns; [] if there is no file.
    """
    if last_round < 0:
        path.unlink(missing_ok=True)
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        header = file.readline()
        has_header = header.endswith("\n")  # else the process was killed while it wrote the first line
        rows = (line for line in file if line.endswith("\n") and int(line.split(",", 1)[0]) <= last_round)
        replace_text(path, (header, *rows) if has_header else ())
    return header.strip().split(",") if has_header else []


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file as dicts from column to text; [] if there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def last_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file with the same value of the column `round` as the last line.

    Returns:
        Dicts from column to text; [] if there is no file.
    """
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if rows and rows[-1]["round"] != row["round"]:
                    rows.clear()
                rows.append(row)
    return rows
