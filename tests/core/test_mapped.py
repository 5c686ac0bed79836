"""Arrays in files: read a block at a time, and given back to the system."""

from __future__ import annotations

import mmap
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedbench.core import digests
from fedbench.core.mapped import EntryReader, blocks, can_read_entries, file_of, is_read_only_file, release, take
from fedbench.core.options import RunError


def written(folder: Path, n: int = 1000) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(0).random((n, 64), np.float32)
    np.save(folder / "x.npy", values)
    return folder / "x.npy", values


def resident(path: Path) -> int:
    """Bytes of a file that this process has mapped and read."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    size = 0
    for line in lines:
        if line.endswith(str(path)):
            size += next(1024 * int(text.split()[1]) for text in lines if text.startswith("Rss:"))
    return size


def test_which_arrays_lie_in_a_file(tmp_path: Path) -> None:
    path, values = written(tmp_path)
    read, changed = np.load(path, mmap_mode="r"), np.load(path, mmap_mode="c")
    assert isinstance(file_of(read), mmap.mmap) and isinstance(file_of(read[3:5].reshape(-1)), mmap.mmap)
    assert file_of(values) is None and file_of(values[2:]) is None
    assert is_read_only_file(read) and not is_read_only_file(changed) and not is_read_only_file(values)


def test_blocks_are_the_whole_in_order() -> None:
    values = np.arange(24).reshape(12, 2)
    parts = list(blocks(values, size=80))
    assert [len(p) for p in parts] == [5, 5, 2] and (np.concatenate(parts) == values).all()
    assert [len(p) for p in blocks(values, size=1)] == [1] * 12
    for whole in (values, np.zeros((0, 3)), np.float64(3) * np.ones(())):
        (only,) = blocks(whole)
        assert only is whole


def test_what_was_changed_is_not_given_back(tmp_path: Path) -> None:
    """Pages of a private copy would be lost."""
    path, values = written(tmp_path)
    changed = np.load(path, mmap_mode="c")
    changed[0] = 7
    release(changed)
    assert (changed[0] == 7).all() and (changed[1:] == values[1:]).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.slow
def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    path, values = written(tmp_path, 100_000)
    read = np.load(path, mmap_mode="r")
    assert read.sum() > 0 and resident(path) > 0.9 * values.nbytes
    release(read)
    assert resident(path) == 0 and (read == values).all()
    release(read)
    most = 0
    for _ in blocks(read, size=1 << 20):
        most = max(most, resident(path))
    assert most < 4 << 20 and resident(path) == 0


def test_the_digest_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in blocks or not, in a file or not: runs that are stored know it."""
    path, values = written(tmp_path)
    whole = digests.digest(values)
    line = f" {values.dtype} {values.shape} {zlib.crc32(values.tobytes()):08x}\n"
    assert whole == digests.digest(np.load(path, mmap_mode="r"))
    monkeypatch.setattr("fedbench.core.mapped.BLOCK_BYTES", 1000)
    monkeypatch.setattr(digests, "blocks", lambda v: blocks(v, 1000))
    assert whole == digests.digest(np.load(path, mmap_mode="r"))
    import hashlib

    assert whole == hashlib.sha256(line.encode()).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_entries_are_read_without_mapping_the_file(tmp_path: Path) -> None:
    path, values = written(tmp_path, 100_000)
    read = np.load(path, mmap_mode="r")
    index = np.array([0, 99_999, 5, 5, 40_000])
    assert (take(read, index) == values[index]).all() and (take(values, index) == values[index]).all()
    out = np.empty((5, 64), np.float32)
    EntryReader(read).into(out, index)
    assert (out == values[index]).all() and resident(path) == 0
    assert take(read, index[:0]).shape == (0, 64)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system reads no part of a file at a place")
def test_entries_of_views_and_of_other_offsets(tmp_path: Path) -> None:
    path, values = written(tmp_path)
    raw = np.memmap(path, np.float32, "r", offset=128 + 4 * 64 * 20, shape=(980, 64))  # beyond the first page
    views = {"part": (raw[7:90], values[27:110]), "plain": (np.asarray(raw), values[20:])}
    views["cut"] = (np.load(path, mmap_mode="r")[3:].reshape(-1, 4, 16), values[3:].reshape(-1, 4, 16))
    for view, wanted in views.values():
        assert can_read_entries(view)
        assert (take(view, np.array([2, 0, 50])) == wanted[[2, 0, 50]]).all()
    assert not can_read_entries(raw[:, :5]) and not can_read_entries(values)
    assert (take(raw[:, :5], np.array([3])) == values[23:24, :5]).all()


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system reads no part of a file at a place")
def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    reader = EntryReader(np.load(path, mmap_mode="r"))
    os.truncate(path, 128 + 4 * 64 * 10)
    out = np.empty((1, 64), np.float32)
    reader.into(out, np.array([9]))
    with pytest.raises(RunError, match="was truncated while the run was reading it"):
        reader.into(out, np.array([10]))
