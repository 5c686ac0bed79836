"""Rows of clients are a matrix: whatever is written, in whatever order and location, is read back, and saved whole."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time
from tiny import CPU, equal

from fedbench.core import rng
from fedbench.core.rows import Rows, RowStore

N = 9
LOCATIONS = st.sampled_from(["device", "host", "disk"])
SHAPES = st.sampled_from([(), (3,), (2, 2)])
IDS = st.lists(st.integers(0, N - 1), unique=True, max_size=N)
WRITES = st.lists(st.tuples(IDS, st.integers(-100, 100)), max_size=6)


def written(rows: Rows, writes: list) -> tuple[torch.Tensor, set[int]]:
    """Write, into the rows and into a plain matrix; returns the matrix and who was written."""
    matrix, touched = rows.default.expand(N, *rows.default.shape).clone(), set()
    for ids, value in writes:
        values = (torch.arange(len(ids)) + value).to(matrix).view(-1, *[1] * rows.default.dim())
        values = values.expand(len(ids), *rows.default.shape)
        rows[np.array(ids, np.int64)] = values
        matrix[ids] = values
        touched |= set(ids)
    return matrix, touched


@the_same_every_time
@given(LOCATIONS, SHAPES, WRITES, IDS)
def test_what_is_written_is_read(location: str, shape: tuple, writes: list, ids: list) -> None:
    rows = Rows("x", N, torch.full(shape, 0.5), CPU, location)
    matrix, touched = written(rows, writes)
    equal(rows[np.array(ids, np.int64)], matrix[ids])
    equal(rows.whole(), matrix)
    assert set(rows.touched()) == touched and rows.used == len(touched)
    assert rows.has(np.arange(N)).tolist() == [i in touched for i in range(N)]


@the_same_every_time
@given(LOCATIONS, LOCATIONS, SHAPES, WRITES, WRITES)
def test_what_is_saved_is_loaded(location: str, other: str, shape: tuple, writes: list, later: list) -> None:
    """Also into rows that live elsewhere and held something else, which can be written again."""
    first, second = (Rows("x", N, torch.zeros(shape), CPU, p) for p in (location, other))
    matrix, _ = written(first, writes)
    written(second, later)
    second.load_state_dict(first.state_dict())
    equal(second.whole(), matrix)
    assert set(second.touched()) == set(first.touched())
    again, _ = written(second, later)
    changed = sorted({i for ids, _ in later for i in ids})
    equal(second[np.array(changed, np.int64)], again[changed])


@the_same_every_time
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 400), st.integers(0, 400))
def test_a_store_puts_rows_where_there_is_room(widths: list[int], device: int, host: int) -> None:
    store = RowStore(N, CPU, device, host)
    for i, width in enumerate(widths):
        store(f"state {i}", torch.zeros(width))
    taken = {"device": 0, "host": 0}
    for rows in store.all.values():
        if rows.location != "disk":
            taken[rows.location] += N * rows.default.numel() * 4
    assert taken["device"] <= device and taken["host"] <= host


@the_same_every_time
@given(
    st.lists(st.integers(0, 13), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 3), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_an_epoch_shows_every_sample_once(sizes: list, batch: int, epochs: int, drop: bool, seed: int) -> None:
    """And a client's batches do not depend on who else trains."""
    n, ids = np.array(sizes), np.arange(len(sizes))
    position, counts = rng.batches(seed, ids, n, batch, epochs=epochs, drop_last=drop)  # [T, K, B], [T, K]
    steps, samples = rng.lengths(n, batch, epochs=epochs, drop_last=drop)
    assert samples.tolist() == counts.sum(0).tolist() and steps.tolist() == (counts > 0).sum(0).tolist()
    for i, size in enumerate(sizes):
        shown = np.concatenate([position[t, i, : counts[t, i]] for t in range(len(position))] or [np.empty(0)])
        each = min(batch, size) * (size // max(min(batch, size), 1)) if drop else size
        for epoch in np.split(shown, epochs) if epochs else []:
            assert len(epoch) == each and len(set(epoch)) == each and set(epoch) <= set(range(size))
        alone, one = rng.batches(seed, ids[i : i + 1], n[i : i + 1], batch, epochs=epochs, drop_last=drop)
        assert (one[:, 0] == counts[: len(one), i]).all()
        assert (alone[:, 0] == position[: len(alone), i, : alone.shape[2]]).all()
