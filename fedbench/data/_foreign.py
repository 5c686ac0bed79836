"""Detection of foreign file formats that no data set reads, so that an error can name the format."""

from __future__ import annotations

import zipfile
from pathlib import Path

from fedbench.core.options import ConfigError

BEGINNINGS = {  # first bytes of a file, and its format as in "it is a Parquet file"
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file of Hugging Face datasets",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "an SQLite database",
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    b"\x1f\x8b": "a gzip file",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
}
LEAF = "a JSON file of LEAF"
INSIDE = ("*.arrow", "*/*.arrow", "*.parquet", "*/*.parquet", "*.json", "*/*.json")  # files of a folder to check


def refuse_foreign(path: Path, reader: str) -> None:
    """Refuse a file of a foreign format, or a folder that contains one.

    Args:
        path: Path of the data set; nothing happens if it does not exist.
        reader: The data set that was asked to read it, for the message, as in "dataset=npz".

    Raises:
        ConfigError: The file starts with the first bytes of a foreign format.
    """
    # INSIDE: patterns of the files in a folder, such as *.parquet
    files = [found for pattern in INSIDE for found in sorted(path.glob(pattern))] if path.is_dir() else [path]
    for file in files:
        if file.is_file() and (foreign := _kind(file)):  # such as "a Parquet file"
            raise ConfigError(
                f"{file} is {foreign}, which {reader} does not read: convert it to a CSV file with one row per sample "
                "(dataset=table_csv), or save arrays X, y and client by numpy.savez (dataset=npz)"
            )


def _kind(path: Path) -> str | None:
    """Return a file's format in words, such as "a Parquet file", by its first bytes; None if it is not recognized."""
    with path.open("rb") as file:
        start = file.read(1024)
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            # An Excel workbook (.xlsx) is a zip with a folder xl.
            return "an Excel workbook" if any(name.startswith("xl/") for name in archive.namelist()) else None
    if start.lstrip()[:1] == b"{" and b'"users"' in start:  # JSON of the benchmark LEAF
        return LEAF
    return next((kind for beginning, kind in BEGINNINGS.items() if start.startswith(beginning)), None)
