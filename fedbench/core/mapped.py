"""Arrays that lie in a file (np.memmap) and may be larger than memory.

What is looked at through the map stays in the process, with a megabyte around it, and counts as its memory until the
system takes it back.  So the whole is read in `blocks`, each given back (`release`) before the next, and single entries
are read from the file itself (`EntryReader`).  The system keeps the file in its own cache as long as it has room.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np

from fedbench.core.options import RunError

BLOCK_BYTES = 64 << 20


def file_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array, or the array of which it is a view, lies in; None where it is in memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def is_read_only_file(array: np.ndarray) -> bool:
    """Whether an array lies in a file that nobody can have written to through it."""
    return file_of(array) is not None and not array.flags.writeable


def release(array: np.ndarray) -> None:
    """Give back the pages of a read-only mapped file that have been read; does nothing for other arrays."""
    if hasattr(mmap, "MADV_DONTNEED") and is_read_only_file(array):
        file = file_of(array)
        assert file is not None
        file.madvise(mmap.MADV_DONTNEED)


def blocks(array: np.ndarray, size: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
    """Consecutive parts of an array along its first axis, of about `size` bytes (the whole where it is smaller, or has
    no axis), each released when the next is asked for."""
    count = len(array) if array.ndim else 0
    step = max(1, size // max(1, array.nbytes // max(1, count)))
    if count <= step:
        yield array
        return
    for start in range(0, count, step):
        yield array[start : start + step]
        release(array)


class EntryReader:
    """Reads entries array[i] of an array [m, ...] in a read-only file, from the file: no page of it is mapped."""

    def __init__(self, array: np.ndarray):
        self.array, self.size = array, array.nbytes // max(1, len(array))
        self.path, self.begin = _place(array)
        self._file = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def into(self, out: np.ndarray, index: np.ndarray) -> None:
        """Write the entries index [b] int64 into out [b, ...], of the array's type; RunError where the file is cut."""
        if not out.size:
            return
        target = out.data.cast("B")
        for i, at in enumerate((self.begin + index * self.size).tolist()):
            got = os.preadv(self._file, [target[i * self.size : (i + 1) * self.size]], at)
            if got != self.size:
                raise RunError(f"{self.path} has become shorter than it was when it was opened")


def take(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """array[index], index [b] int64, without mapping pages of a read-only file.  # [b, ...]"""
    if not can_read_entries(array):
        return array[index]
    out = np.empty((len(index), *array.shape[1:]), array.dtype)
    EntryReader(array).into(out, index)
    return out


def can_read_entries(array: np.ndarray) -> bool:
    """Whether `EntryReader` can read this array, on this system."""
    return (
        hasattr(os, "preadv") and is_read_only_file(array) and array.flags.c_contiguous and _memmap(array) is not None
    )


def _memmap(array: np.ndarray) -> np.memmap | None:
    """The np.memmap that an array is, or is a view of."""
    base: object = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return base if isinstance(base, np.memmap) and base.filename is not None else None


def _place(array: np.ndarray) -> tuple[str, int]:
    """The file that an array lies in, and at which byte of it the array begins."""
    memmap, file = _memmap(array), file_of(array)
    assert memmap is not None and file is not None
    mapped_from = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY  # where np.memmap begins its map
    first = np.frombuffer(file, np.uint8, 1).ctypes.data
    return os.fspath(memmap.filename), mapped_from + array.ctypes.data - first  # type: ignore[arg-type]
