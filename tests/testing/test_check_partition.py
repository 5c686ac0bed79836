"""Checks of a user's partition: a correct one passes, and each check finds its mistake."""

from __future__ import annotations

import numpy as np
import pytest
from contract import assert_failed

from fedbench.core.split import Ragged
from fedbench.testing import check_partition, partition


class Blocks:
    """Clients in blocks of neighbours, after a shuffle."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        dealt = []
        for pool in pools:
            shuffled = rng.permutation(pool)
            dealt.append(Ragged.from_lists(np.array_split(shuffled, num_clients)))
        return dealt


class Shuffled:
    """Shuffles the pools that it is given, by NumPy's global generator."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        for pool in pools:
            np.random.shuffle(pool)  # noqa: NPY002
        return [np.array_split(pool, num_clients) for pool in pools]


class Forgetting:
    """Deals half of the samples, and one of them twice."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        dealt = [np.array_split(pool[: len(pool) // 2], num_clients) for pool in pools]
        if hasattr(self, "twice"):
            dealt[0][1] = np.append(dealt[0][1], dealt[0][0][0])
        return dealt


class Twice(Forgetting):
    twice = True


class Crossed:
    """Gives training samples out as test samples."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.array_split(pool, num_clients) for pool in pools[::-1]]


class Uneven:
    """Keeps no promise about sizes."""

    min_size = 50

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.split(pool, [20, *range(40, 20 * num_clients, 20)]) for pool in pools]


class Fragile:
    """Cannot divide among one."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.array_split(pool, num_clients * (num_clients - 1) // (num_clients - 1)) for pool in pools]


class Greedy:
    """The first client has everything."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [[pool, *[pool[:0]] * (num_clients - 1)] for pool in pools]


MISTAKES = [
    (Shuffled, "no_global_generator", "NumPy"),
    (Shuffled, "inputs_are_unchanged", "in place"),
    (Shuffled, "a_seed_repeats", "another partition"),
    (Forgetting, "every_sample_once", "belong to no client"),
    (Twice, "every_sample_once", "given away twice"),
    (Crossed, "every_sample_once", "not in the pool"),
    (Crossed, "published_parts_stay_apart", "Remedy: the i-th list"),
    (Uneven, "sizes_are_kept", "min_size=50"),
    (Greedy, "nobody_is_empty", "fewer than 2 samples"),
    (Fragile, "hard_requests_are_met_or_refused", "1 client(s) of 1,800 samples: ZeroDivisionError"),
]


def test_a_correct_one_passes() -> None:
    report = check_partition(Blocks, num_clients=7)
    report.raise_if_failed()
    assert list(report.skipped) == ["sizes_are_kept"]


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_partition(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    """Subjects are an exception: `build_split` keeps them whole, so a partition cannot divide them."""
    assert {check for _, check, _ in MISTAKES} == set(partition.SUITE.checks) - {"subjects_stay_whole"}
