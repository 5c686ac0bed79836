"""Read memory-mapped arrays (np.memmap), which may be larger than memory.

Pages that are read through the map count as memory of the process until the system reclaims them.  So whole arrays are
read in `blocks`, which are released one by one, and single entries are read from the file (`EntryReader`).
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
    """Return the memory map of which an array is a view; None if the array is not memory-mapped."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def is_read_only_file(array: np.ndarray) -> bool:
    """Return whether an array is a read-only view of a memory-mapped file."""
    return file_of(array) is not None and not array.flags.writeable


def release(array: np.ndarray) -> None:
    """Free the memory of the pages of an array's file, if the array is a read-only view of a memory-mapped file.

    Its values stay: the system reads the pages again when they are used.  For other arrays, do nothing.
    """
    if hasattr(mmap, "MADV_DONTNEED") and is_read_only_file(array):
        file = file_of(array)
        assert file is not None
        file.madvise(mmap.MADV_DONTNEED)


def blocks(array: np.ndarray, size: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
    """Yield consecutive parts of an array along its first axis, and free the memory of each before the next.

    Memory is freed only if the array is mapped from a file (`release`).  An array of one part is yielded whole.

    Args:
        array: The array [n, ...], or a scalar array.
        size: The approximate bytes per part.
    """
    count = len(array) if array.ndim else 0
    step = max(1, size // max(1, array.nbytes // max(1, count)))
    if count <= step:
        yield array
        return
    for start in range(0, count, step):
        yield array[start : start + step]
        release(array)


class EntryReader:
    """Read entries of a memory-mapped array from its file, without mapping pages.

    Args:
        array: A read-only memory-mapped array [m, ...].

    Attributes:
        array: The array.
        size: The bytes of an entry.
        path: The file.
        begin: The byte of the file at which the array begins.
    """

    def __init__(self, array: np.ndarray):
        self.array, self.size = array, array.nbytes // max(1, len(array))
        self.path, self.begin = _position_in_file(array)
        self._file = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def into(self, out: np.ndarray, index: np.ndarray) -> None:
        """Read entries into an array.

        Args:
            out: The result [b, ...], of the type of the array.
            index: Positions on the first axis [b] int64.

        Raises:
            RunError: The file is shorter than when it was opened.
        """
        if not out.size:
            return
        target = out.data.cast("B")  # the bytes of out
        # begin: the byte of the file at which the array begins; size: the bytes of an entry
        for i, first_byte in enumerate((self.begin + index * self.size).tolist()):
            num_read = os.preadv(self._file, [target[i * self.size : (i + 1) * self.size]], first_byte)
            if num_read != self.size:
                raise RunError(
                    f"{self.path} was truncated while the run was reading it: restore the file, and resume the run"
                )


def take(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return array[index], without mapping pages of a read-only mapped array.

    Args:
        array: The array [m, ...].
        index: Positions on the first axis [b] int64.

    Returns:
        The entries [b, ...].
    """
    if not can_read_entries(array):
        return array[index]
    out = np.empty((len(index), *array.shape[1:]), array.dtype)
    EntryReader(array).into(out, index)
    return out


def can_read_entries(array: np.ndarray) -> bool:
    """Return whether `EntryReader` can read an array: a contiguous read-only np.memmap, on a system with preadv."""
    return (
        hasattr(os, "preadv") and is_read_only_file(array) and array.flags.c_contiguous and _memmap(array) is not None
    )


def _memmap(array: np.ndarray) -> np.memmap | None:
    """Return the np.memmap of which an array is a view, or the array itself if it is one; None for other arrays."""
    base: object = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return base if isinstance(base, np.memmap) and base.filename is not None else None


def _position_in_file(array: np.ndarray) -> tuple[str, int]:
    """Return the path of a mapped array's file, and the byte of the file at which the array begins."""
    memmap, file = _memmap(array), file_of(array)
    assert memmap is not None and file is not None
    mapped_from = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY  # the byte of the file: a page's first
    map_address = np.frombuffer(file, np.uint8, 1).ctypes.data  # the address of that byte in memory
    return os.fspath(memmap.filename), mapped_from + array.ctypes.data - map_address  # type: ignore[arg-type]
