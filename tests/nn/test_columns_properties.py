"""Columns are sets of positions: whatever the slices, their algebra is that of sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time
from tiny import equal

from fedbench.nn.columns import Columns

SIZE = 12
SLICES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=5)


def positions(columns: Columns) -> set[int]:
    return {i for a, b in columns.slices for i in range(a, b)}


def rows(*lead: int) -> torch.Tensor:
    return torch.rand(*lead, SIZE, generator=torch.Generator().manual_seed(1))


@the_same_every_time
@given(SLICES, SLICES)
def test_algebra_is_that_of_sets(first: list, second: list) -> None:
    a, b = Columns(first), Columns(second)
    assert positions(a) == {i for low, high in first for i in range(low, high)}
    assert positions(a & b) == positions(a) & positions(b)
    assert positions(a | b) == positions(a) | positions(b)
    assert positions(a.rest(SIZE)) == set(range(SIZE)) - positions(a)
    assert (a.rest(SIZE) & a).size == 0 and (a.rest(SIZE) | a).size == SIZE


@the_same_every_time
@given(SLICES)
def test_slices_are_merged_and_in_order(slices: list) -> None:
    columns = Columns(slices)
    edges = [edge for span in columns.slices for edge in span]
    assert edges == sorted(set(edges)) and columns.size == len(columns) == len(positions(columns))


@the_same_every_time
@given(SLICES, st.sampled_from([(), (3,), (2, 3)]))
def test_put_and_take_are_inverse(slices: list, lead: tuple) -> None:
    columns, x = Columns(slices), rows(*lead)
    values = torch.rand(*lead, columns.size)
    put = columns.put(x, values)
    equal(columns.take(put), values)
    equal(columns.rest(SIZE).take(put), columns.rest(SIZE).take(x))
    equal(columns.put(x, columns.take(x)), x)


@the_same_every_time
@given(SLICES, st.sampled_from([(), (3,), (2, 3)]))
def test_a_view_is_taken_and_written_into(slices: list, lead: tuple) -> None:
    columns, x = Columns(slices), rows(*lead)
    if len(columns.slices) > 1:
        with pytest.raises(ValueError, match=f"{len(columns.slices)} slices"):
            columns.view(x)
        return
    equal(columns.view(x), columns.take(x))
    columns.view(x).fill_(7)
    equal(x, columns.put(rows(*lead), torch.full((columns.size,), 7.0)))
