"""Digests of values and files, to detect damaged files and changed data.

Arrays are hashed by CRC-32, which is faster than sha256: digests detect damage and mistakes, not forgery.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbench.core.mapped import blocks

BLOCK = 1 << 20
Mark = list  # [size in bytes, CRC-32 as hex] of a file or of its beginning


class Widened(NamedTuple):
    """An array whose digest is computed as if it had another type.

    Attributes:
        array: The array.
        dtype: The type.
    """

    array: np.ndarray
    dtype: type


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a value.

    Args:
        value: A number, text, None, a NumPy array, or nested lists and mappings of them.

    Raises:
        ValueError: It contains an object of another type.
    """
    sha = hashlib.sha256()
    for line in _lines("", value):
        sha.update(f"{line}\n".encode())
    return sha.hexdigest()


def _lines(where: str, value: Any) -> Iterator[str]:
    """Yield one line of text for each leaf, list and mapping in a value.  Equal values have equal lines.

    Args:
        where: The path of the value inside the hashed value, such as "/'x'/0" for its entry "x", item 0.
        value: Numbers, text, None, NumPy arrays, lists and mappings of these.
    """
    if isinstance(value, np.generic):
        value = value.item()
    # Widened: an array that is hashed as another type; converted in blocks, because it may not fit in memory
    if isinstance(value, Widened):
        parts = (block.astype(value.dtype, order="C") for block in blocks(value.array, BLOCK))
        yield _line(where, value.dtype, value.array, parts)
    elif isinstance(value, np.ndarray):
        yield _line(where, value.dtype, value, map(np.ascontiguousarray, blocks(value)))
    elif isinstance(value, Mapping):
        yield f"{where} {len(value)} entries"
        for name in sorted(value, key=str):
            yield from _lines(f"{where}/{name!r}", value[name])
    elif isinstance(value, list | tuple):
        yield f"{where} {len(value)} items"
        for i, item in enumerate(value):
            yield from _lines(f"{where}/{i}", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield f"{where} {value!r}"
    else:
        raise ValueError(
            f"the value at {where or '/'} is a {type(value).__name__}, which cannot be hashed: store only numbers, "
            "text, None, NumPy arrays, lists and mappings"
        )


def _line(where: str, dtype: Any, array: np.ndarray, parts: Iterable[np.ndarray]) -> str:
    """Return one line with the type, the shape and the CRC-32 of an array.

    Args:
        where: The path of the array inside the hashed value, such as "/'x'/0" for its entry "x", item 0.
        dtype: The type of the parts.
        array: The array, of which only the shape is used.
        parts: The content of the array in consecutive C-contiguous parts.
    """
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.data, crc)
    return f"{where} {np.dtype(dtype)} {array.shape} {crc:08x}"


class Running:
    """The mark (size and CRC-32) of a growing sequence of bytes.

    Args:
        size: The number of earlier bytes.
        crc: Their CRC-32 as hex.
    """

    def __init__(self, size: int = 0, crc: str = "0"):
        self.size, self.crc = size, int(crc, 16)

    def add(self, data: bytes) -> None:
        """Append bytes to the sequence whose size and CRC-32 are computed."""
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)

    @property
    def mark(self) -> Mark:
        """[number of bytes, CRC-32 as hex] of all bytes that were added so far."""
        return [self.size, f"{self.crc:08x}"]


def mark_of(path: Path, size: int | None = None) -> Mark:
    """Return the size in bytes and the CRC-32, as hex, of a file or of its beginning.

    Args:
        path: The file.  A missing file counts as an empty one.
        size: The number of bytes to read from its beginning.  None: all.
    """
    running, max_size = Running(), -1 if size is None else size
    if path.is_file():
        with open(path, "rb") as file:
            while data := file.read(BLOCK if max_size < 0 else min(BLOCK, max_size - running.size)):
                running.add(data)
    return running.mark


def differing(folder: Path, marks: Mapping[str, Mark], whole: bool) -> str | None:
    """Return the name of the first file that does not match its mark; None if all match.

    Args:
        folder: The folder of the files.
        marks: Size and CRC-32 by file name.
        whole: Whether to compare whole files, or only their beginnings of the recorded size.
    """
    for name, mark in marks.items():
        size, _ = mark
        if mark_of(folder / name, size=None if whole else size) != mark:
            return name
    return None
