"""CSV files of a run that grow round by round, and are cut where a resumed run goes on."""

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

ROWS = 10_000  # of a table that are written at a time


class CsvTable:
    """A CSV file that grows: the first row ever written fixes its columns; the first column is ``round``.

    Rows of rounds after ``last_round`` (all rows where it is negative), and a last line cut off by a crash, are
    removed when it is opened.
    """

    def __init__(self, path: Path, last_round: int) -> None:
        self.path = path
        self.columns = truncate_rounds(path, last_round)
        self.written = Running(*mark_of(path))
        self._file = path.open("ab")

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows and flush; a row may lack columns, but one with an unknown column is refused (ValueError)."""
        for row in rows:
            self._check_columns(row)
            self._write([",".join(cell(row.get(name)) for name in self.columns) + "\n"])
        self._file.flush()

    def extend(self, columns: Mapping[str, np.ndarray]) -> None:
        """Write the rows of columns [n] of equal length, and flush; what is written is made a column at a time."""
        self._check_columns(columns)
        arrays = [np.asarray(columns[name]) if name in columns else None for name in self.columns]
        count = max(len(a) for a in arrays if a is not None)
        texts = [
            repeat("", count)
            if a is None
            else map(repr, a.tolist())
            if a.dtype.kind == "f"
            else map(quoted, a.tolist())
            if a.dtype.kind == "U"
            else map(str, a.astype(np.int64).tolist())
            for a in arrays
        ]
        self._write(",".join(row) + "\n" for row in zip(*texts, strict=True))
        self._file.flush()

    def _write(self, lines: Iterable[str]) -> None:
        unwritten = iter(lines)
        while data := "".join(islice(unwritten, ROWS)).encode():
            self._file.write(data)
            self.written.add(data)

    def _check_columns(self, names: Iterable[str]) -> None:
        """Begin the file with these columns, or refuse one that it does not have."""
        if not self.columns:
            self.columns = list(names)
            self._write([",".join(self.columns) + "\n"])
        unknown = ", ".join(name for name in names if name not in self.columns)
        if unknown:
            raise ValueError(f"{self.path.name} has no column {unknown}; the first row fixed the columns")

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cell(value: Any) -> str:
    """A value as it stands in a CSV file: the shortest digits that give the same number back."""
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    return quoted(value) if isinstance(value, str) else str(int(value))


def quoted(text: str) -> str:
    """Return text without line breaks as a cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def truncate_bytes(path: Path, size: int) -> None:
    """Leave the first bytes of a file (0: remove it)."""
    if size == 0:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > size:
        os.truncate(path, size)


def truncate_rounds(path: Path, last_round: int) -> list[str]:
    """Leave the header and the rows of rounds <= last_round (negative: remove the file); returns the columns."""
    if last_round < 0:
        path.unlink(missing_ok=True)
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        header = file.readline()
        whole = header.endswith("\n")
        rows = (line for line in file if line.endswith("\n") and int(line.split(",", 1)[0]) <= last_round)
        replace_text(path, (header, *rows) if whole else ())
    return header.strip().split(",") if whole else []


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as dicts of strings; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def last_rows(path: Path) -> list[dict[str, str]]:
    """Rows of the last round of a CSV file, read without holding the others."""
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if rows and rows[-1]["round"] != row["round"]:
                    rows.clear()
                rows.append(row)
    return rows
