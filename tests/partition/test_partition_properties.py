"""Whatever the data and the request: a partition gives every sample to one place, or refuses in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time

from fedbench.core.options import ConfigError
from fedbench.core.split import Ragged, Split
from fedbench.data.base import TEST, Arrays
from fedbench.partition.base import build_split
from fedbench.partition.class_disjoint import ClassDisjoint
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.domain import Domain
from fedbench.partition.iid import IID
from fedbench.partition.pathological import Pathological
from fedbench.partition.practical import Practical

LISTS = st.lists(st.lists(st.integers(0, 999), max_size=6), min_size=1, max_size=8)


@st.composite
def data_sets(draw: Any) -> Arrays:
    """12 to 150 samples of 2 to 6 classes, in one to four silos, some published as test, in subjects or not."""
    n, classes = draw(st.integers(12, 150)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    domain = rng.integers(0, draw(st.integers(1, 4)), n)
    subject = rng.integers(0, n, n) if draw(st.booleans()) else None
    part = np.where(rng.random(n) < 0.3, TEST, 0).astype(np.int8)
    y = rng.integers(0, classes, n)
    return Arrays(np.zeros((n, 1), np.float32), y, part, classes, domain=domain, subject=subject)


def dirichlets() -> st.SearchStrategy:
    return st.builds(
        Dirichlet,
        alpha=st.sampled_from([0.1, 1.0, 10.0]),
        min_size=st.sampled_from([1, 2, 4]),
        cap=st.booleans(),
    )


def partitions() -> st.SearchStrategy:
    drawn = st.sampled_from([IID(), ClassDisjoint(), Pathological(), Pathological(distinct=True), Practical()])
    domains = st.builds(Domain, clients_per_domain=st.integers(1, 2), alpha=st.sampled_from([None, 1.0]))
    return st.one_of(drawn, dirichlets(), domains)


# -- lists of samples ------------------------------------------------------------------------------------
@the_same_every_time
@given(LISTS)
def test_lists_come_back_as_they_were(lists: list[list[int]]) -> None:
    ragged = Ragged.from_lists([np.array(each, np.int64) for each in lists])
    assert [ragged[i].tolist() for i in range(len(ragged))] == lists
    assert ragged.sizes.tolist() == [len(each) for each in lists]
    again = Ragged.from_owners(ragged.indices, ragged.owners(), len(lists))
    assert [again[i].tolist() for i in range(len(again))] == lists
    assert ragged.ranks().tolist() == [rank for each in lists for rank in range(len(each))]


@the_same_every_time
@given(LISTS, st.data())
def test_selected_lists_are_those_of_the_ids(lists: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.from_lists([np.array(each, np.int64) for each in lists])
    ids = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10))
    picked = ragged.select(ids)
    assert [picked[i].tolist() for i in range(len(picked))] == [lists[i] for i in ids]
    assert ragged.sizes_of(np.array(ids, np.int64)).tolist() == [len(lists[i]) for i in ids]


# -- splits ----------------------------------------------------------------------------------------------
@the_same_every_time
@given(
    data_sets(),
    partitions(),
    st.integers(1, 8),
    st.sampled_from(["merged", "published", "stratified"]),
    st.sampled_from([0.1, 0.25, 0.6]),
    st.sampled_from([0.0, 0.2]),
)
def test_every_sample_has_one_place(
    arrays: Arrays, partition: Any, clients: int, how: str, test: float, val: float
) -> None:
    """A request is met or refused in one sentence; what it was given is not touched, and it can be asked again."""
    num_clients = None if isinstance(partition, Domain) else clients
    before = arrays.targets.copy()
    try:
        split = build_split(arrays, partition, num_clients, 1, how, test, val)
    except ConfigError as refused:
        assert "\n" not in str(refused)
        return
    finally:
        assert (arrays.targets == before).all()
    complete(split, arrays, partition)
    assert build_split(arrays, partition, num_clients, 1, how, test, val).hash == split.hash
    if how == "published":
        assert (arrays.split[split.test.indices] == TEST).all() and (arrays.split[split.train.indices] != TEST).all()
    if arrays.subject is not None:
        trained = set(arrays.subject[split.train.indices])
        assert not trained & set(arrays.subject[split.test.indices])


def complete(split: Split, arrays: Arrays, partition: Any) -> None:
    used = np.concatenate([part.indices for part in (split.train, split.val, split.test)])
    assert len(np.unique(used)) == len(used)
    assert (split.train.sizes > 0).all() and (split.test.sizes > 0).all()
    if not isinstance(partition, Pathological | Practical):  # which leave out what rounding does
        assert len(used) == len(arrays)


@the_same_every_time
@given(st.integers(2, 200), st.integers(1, 12), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_a_cut_leaves_everybody_something_on_either_side(samples: int, clients: int, test: float) -> None:
    y = np.arange(samples) % 2
    arrays = Arrays(np.zeros((samples, 1), np.float32), y, np.zeros(samples, np.int8), 2)
    if samples < 2 * clients:
        with pytest.raises(ConfigError):
            build_split(arrays, IID(), clients, 0, "merged", test)
        return
    split = build_split(arrays, IID(), clients, 0, "merged", test)
    whole = split.train.sizes + split.test.sizes
    assert (split.train.sizes == np.maximum(np.floor((1 - test) * whole + 1e-9), 1)).all()
    assert (split.test.sizes >= 1).all() and whole.sum() == samples and np.ptp(whole) <= 1
