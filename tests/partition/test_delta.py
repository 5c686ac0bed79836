"""Label imbalance and tables of counts, against the numbers behind pFedNet's tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data.base import TEST, Arrays
from fedbench.partition.base import build_split
from fedbench.partition.delta import Delta
from fedbench.partition.domain_counts import DomainCounts

LUNA16 = {  # delta: counts of the two skewed kinds of clients, and the size of all test parts in the paper's table
    1: ([200, 200], [200, 200], 400),
    2: ([260, 130], [130, 260], 392),
    4: ([316, 79], [79, 316], 396),
    7: ([350, 50], [50, 350], 400),
}


def table(negatives: int, positives: int, **more: Any) -> Arrays:
    labels = np.repeat([0, 1], [negatives, positives])
    n = len(labels)
    return Arrays(np.zeros((n, 1), np.float32), labels, more.pop("split", np.zeros(n, np.int8)), 2, **more)


def divided(arrays: Arrays, partition: Any, num_clients: int | None = 5, seed: int = 0) -> Split:
    return build_split(arrays, partition, num_clients, seed, test_fraction=0.2)


def held(arrays: Arrays, split: Split) -> list[list[int]]:
    """[neg, pos] of each client, training and test parts together."""
    both = [np.concatenate([split.train[i], split.test[i]]) for i in range(split.num_clients)]
    return [np.bincount(arrays.targets[b], minlength=2).tolist() for b in both]


@pytest.mark.parametrize("delta", [1.0, 2.0, 3.0, 4.0])
def test_counts_by_the_formula(delta: float) -> None:
    arrays = table(1000, 1000)
    s = 400
    major, minor = int(s * delta / (1 + delta) + 1e-9), int(s / (1 + delta) + 1e-9)
    wanted = [[major, minor]] * 2 + [[200, 200]] + [[minor, major]] * 2
    assert held(arrays, divided(arrays, Delta(delta))) == wanted


def test_counts_by_hand() -> None:
    """50 of each kind: s = 20, 2 : 1 is 13.33 to 6.67."""
    assert held(table(50, 50), divided(table(50, 50), Delta(2.0))) == [[13, 6], [13, 6], [10, 10], [6, 13], [6, 13]]


@pytest.mark.parametrize("delta", LUNA16)
def test_luna16_gives_the_test_totals_of_the_paper(delta: int) -> None:
    first, last, tested = LUNA16[delta]
    arrays, counts = table(3000, 1000), [first, first, [200, 200], last, last]
    split = divided(arrays, Delta(counts=counts))
    assert held(arrays, split) == counts and split.test.sizes.sum() == tested


def test_the_larger_class_is_undersampled_at_random() -> None:
    arrays = table(900, 100)
    split = divided(arrays, Delta(1.0))
    assert held(arrays, split) == [[20, 20]] * 5
    chosen = split.train.indices[arrays.targets[split.train.indices] == 0]
    assert chosen.max() > 500, "not the first of them"
    assert divided(arrays, Delta(1.0)).hash == split.hash != divided(arrays, Delta(1.0), seed=1).hash


def test_counts_beyond_the_balanced_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="asks for 90 negatives, but only 30 remain after balancing"):
        divided(table(90, 30), Delta(counts=[[60, 10], [30, 20]]), 2)


def test_every_class_but_the_first_is_positive() -> None:
    labels = np.repeat([0, 1, 2], 40)
    lists = Delta(1.0).assign(labels, [np.arange(120)], 2, np.random.RandomState(0))[0]
    assert [(labels[lists[i]] == 0).sum() for i in range(2)] == [20, 20]
    assert set(labels[lists.indices]) == {0, 1, 2}


def test_a_published_test_part_is_divided_by_the_same_rule() -> None:
    arrays = table(100, 100, split=np.tile([0, 0, 0, 0, TEST], 40).astype(np.int8))
    split = build_split(arrays, Delta(counts=[[40, 8], [8, 40]]), 2, 0, "published")
    assert np.bincount(arrays.targets[split.test[0]]).tolist() == [10, 2]


@pytest.mark.parametrize(
    ("options", "clients", "said"),
    [
        ({"counts": [[1, -1], [1, 1]]}, 2, "a pair of numbers"),
        ({"counts": [[9, 9], [9, 9]]}, 3, "partition.num_clients=3, but partition.counts has 2 rows"),
        ({}, 1, "must be at least 2"),
    ],
)
def test_mistakes_are_one_sentence(options: dict, clients: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divided(table(50, 50), Delta(**options), clients)


def test_one_kind_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="has only one of them"):
        divided(table(50, 0), Delta())


def test_counts_of_client_sites() -> None:
    domain = np.arange(120) % 3
    arrays = table(60, 60, domain=domain)
    counts = [[30, 0, 10], [5, 40, 20]]
    split = divided(arrays, DomainCounts(counts), None)
    both = [np.concatenate([split.train[i], split.test[i]]) for i in range(2)]
    assert [np.bincount(domain[b], minlength=3).tolist() for b in both] == counts


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([[41, 1, 1]], "asks for 41 samples of client site 0, but there are 40"),
        ([[1, 1]], "has 2 columns, but the data set has 3"),
        ([[1, 1, 1], [1, 1]], "a row for each client"),
        ([], "a row for each client"),
    ],
)
def test_counts_that_do_not_fit(counts: list, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        divided(table(60, 60, domain=np.arange(120) % 3), DomainCounts(counts), None)
    with pytest.raises(ConfigError, match="needs a data set with client sites"):
        divided(table(60, 60), DomainCounts([[9, 9]]), None)
