"""Checks of partitions: every sample once, no empty client, and the same result for a seed.

The data have 1,800 samples of 10 classes and 4 domains, a fifth of which is published as test samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import numpy as np

from fedbench.core.error_text import describe_error
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged, Split
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.partition.base import build_split, partition_labels
from fedbench.simulation.instantiate import make
from fedbench.testing import _probes as probes
from fedbench.testing._suite import Report, Suite
from fedbench.testing._targets import Target, described, path_of

SAMPLES, CLASSES, DOMAINS, CLIENTS = 1800, 10, 4, 10


@dataclass
class PartitionCase:
    """A partition to check: its class and options, a number of clients, and a seed.

    Args:
        values: `_target_` and options of the partition.
        num_clients: The number of clients; None if the partition determines it.
        seed: The seed.
    """

    values: dict[str, Any]
    num_clients: int | None
    seed: int = 1

    def make(self) -> Any:
        """Return a new object of the partition's class."""
        return make(self.values)

    def split(self, split: str = "merged", arrays: Arrays | None = None) -> Split:
        """Return the split of a data set over the clients, with training and test samples.

        Args:
            split: The option dataset.split: "merged" (into training and test) or "published" (test samples).
            arrays: The data set; None for `example_data`.
        """
        return build_split(arrays or example_data(), self.make(), self.num_clients, self.seed, split)

    def assign(self, arrays: Arrays, pools: list[np.ndarray]) -> list[Ragged]:
        """Return what the partition's `assign` returns for these pools, as Ragged arrays.

        Args:
            arrays: The data set.
            pools: The indices of the samples to assign, such as published training and published test samples.

        Returns:
            For each pool, the indices of the samples of each client.
        """
        partition, rng = self.make(), np.random.RandomState(self.seed)
        n = partition.default_num_clients(arrays.num_domains) if self.num_clients is None else self.num_clients
        lists = partition.assign(partition_labels(partition, arrays), pools, n, rng, arrays.domain)
        return [samples if isinstance(samples, Ragged) else Ragged.from_lists(samples) for samples in lists]


SUITE: Suite[PartitionCase] = Suite("partition")


def check_partition(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    num_clients: int | None = CLIENTS,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a partition.

    Args:
        target: Its class, its dotted path, or an option of conf/partition.
        options: Arguments of its constructor.
        num_clients: The number of clients.  Partitions with a method `default_num_clients` ignore it.
        only: The names of the checks to run; None runs all.

    Returns:
        The result of every check.

    Raises:
        ConfigError: The partition cannot be built.
    """
    case = case_for(target, options, num_clients)
    clients = "the partition's number of clients" if case.num_clients is None else f"{case.num_clients} clients"
    # setting: clients and samples, for the heading of the report
    setting = f"for {clients} on {SAMPLES:,} samples of {CLASSES} classes in {DOMAINS} domains"
    return SUITE.run(path_of(target), setting, case, only)


def case_for(
    target: Target, options: Mapping[str, Any] | None = None, num_clients: int | None = CLIENTS
) -> PartitionCase:
    """Return the case that the checks receive: the partition, its number of clients and its seed.

    Args:
        target: Its class, its dotted path, or an option of conf/partition.
        options: Arguments of its constructor.
        num_clients: The number of clients.  Partitions with a method `default_num_clients` ignore it.

    Raises:
        ConfigError: It cannot be built, or has no method `assign`.
    """
    values = described("partition", target, options)
    seed, num_clients = values.pop("seed", 1), values.pop("num_clients", num_clients)
    case = PartitionCase(values, num_clients, seed)
    partition = case.make()
    message = f"{path_of(target)} is not a partition: add a method assign(...), or name a class that has it"
    require(callable(getattr(partition, "assign", None)), message)
    if "num_clients" not in (options or {}) and hasattr(partition, "default_num_clients"):
        case.num_clients = None
    return case


def example_data() -> Arrays:
    """Return a data set with random labels and domains, the same in each call.

    A fifth of its samples are published as test samples, the others as training samples.
    """
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(SAMPLES) % CLASSES).astype(np.int64)
    published = np.where(np.arange(SAMPLES) % 5 == 0, TEST, TRAIN).astype(np.int8)
    return Arrays(np.zeros((SAMPLES, 1), np.float32), y, published, CLASSES, domain=rng.integers(0, DOMAINS, SAMPLES))


def _pools(arrays: Arrays) -> list[np.ndarray]:
    """Return two arrays of sample indices: those of the published training part, and of the published test part."""
    return [np.flatnonzero(arrays.split == code) for code in (TRAIN, TEST)]


# -- the checks ------------------------------------------------------------------------------------------
@SUITE.check
def every_sample_once(case: PartitionCase) -> None:
    """Every sample belongs to one client, except for a few that rounding leaves out.

    Remedy: return indices of each pool, and assign all samples, or set leaves_samples_out = True in the class.
    """
    arrays = example_data()
    for pools in ([np.arange(SAMPLES)], _pools(arrays)):
        assigned = case.assign(arrays, [pool.copy() for pool in pools])
        assert len(assigned) == len(pools), f"`assign` returns {len(assigned)} lists for {len(pools)} pools"
        for pool, clients in zip(pools, assigned):
            unknown = np.setdiff1d(clients.indices, pool)
            assert not len(unknown), f"sample {unknown[0]} is not in the pool"
            samples, counts = np.unique(clients.indices, return_counts=True)
            twice = samples[counts > 1]
            assert not len(twice), f"{len(twice):,} samples are given away twice, for example sample {twice[0]}"
            omitted = len(pool) - len(samples)
            limit = 2 * CLASSES * len(clients)  # rounding down may lose a sample or two per class and client
            is_declared = getattr(case.make(), "leaves_samples_out", False)
            assert omitted <= limit or is_declared, f"{omitted:,} of {len(pool):,} samples belong to no client"


@SUITE.check
def nobody_is_empty(case: PartitionCase) -> None:
    """Every client has training and test samples.

    Remedy: assign samples of each pool to every client.
    """
    for split in ("merged", "published"):
        try:
            case.split(split)  # raises ConfigError if a client has no samples
        except ConfigError as refused:
            raise AssertionError(f"dataset.split={split}: {refused}") from None


@SUITE.check
def sizes_are_kept(case: PartitionCase) -> None:
    """No client has fewer samples than the options min_size and min_test of the partition.

    Remedy: draw again or move samples until every client has enough, or raise ConfigError.
    """
    partition = case.make()
    if not (hasattr(partition, "min_size") or hasattr(partition, "min_test")):
        raise SkipTest("it has no options min_size and min_test")
    arrays = example_data()
    # assign divides two pools, the published training samples and the published test samples, over clients
    for name, clients in zip(("min_size", "min_test"), case.assign(arrays, _pools(arrays))):
        limit, smallest = getattr(partition, name, 0), clients.sizes.min()
        assert smallest >= limit, f"{name}={limit}, but a client has {smallest} samples"


@SUITE.check
def a_seed_repeats(case: PartitionCase) -> None:
    """Equal seeds give equal clients.

    Remedy: use only the random generator `rng` that `assign` receives.
    """
    assert case.split().hash == case.split().hash, "the same seed gives another partition"


@SUITE.check
def no_global_generator(case: PartitionCase) -> None:
    """The global random generators of NumPy, torch and Python are not used.

    Remedy: use only the random generator `rng` that `assign` receives.
    """
    expected = case.split().hash
    with probes.other_global_seed(12345):
        states = probes.global_random_states()
        found = case.split().hash
        used = probes.generators_used_since(states)
    names = " and ".join(used) or "torch, NumPy or Python"
    assert not used and found == expected, f"`assign` uses the global random generator of {names}"


@SUITE.check
def inputs_are_unchanged(case: PartitionCase) -> None:
    """`assign` does not change labels, pools and domains.

    Remedy: shuffle a copy: rng.permutation instead of rng.shuffle.
    """
    arrays, original = example_data(), example_data()
    pools = _pools(arrays)
    case.assign(arrays, pools)
    now = {"labels": arrays.targets, "domain": arrays.domain, "pools": np.concatenate(pools)}
    before = {"labels": original.targets, "domain": original.domain, "pools": np.concatenate(_pools(original))}
    for name, values in now.items():
        assert np.array_equal(values, before[name]), f"`assign` changes {name} in place"  # type: ignore[arg-type]


@SUITE.check
def published_parts_stay_apart(case: PartitionCase) -> None:
    """Published training samples are used for training, and test samples for testing.

    Remedy: the i-th list must contain samples of the i-th pool.
    """
    arrays = example_data()
    split = case.split("published", arrays)
    is_train, is_test = arrays.split[split.train.indices] == TRAIN, arrays.split[split.test.indices] == TEST
    assert is_train.all() and is_test.all(), "published training and test samples are mixed"


@SUITE.check
def subjects_stay_whole(case: PartitionCase) -> None:
    """The samples of a subject, such as a patient, are not split into training and test samples.

    A client's samples are later split by whole subjects, so that only a subject with two clients can fail.

    Remedy: assign all samples of a subject to the same client.
    """
    arrays = example_data()
    arrays.subject = np.arange(SAMPLES) // 2
    try:
        split = case.split(arrays=arrays)
    except ConfigError as refused:
        raise SkipTest(f"it divides a subject between clients, so such data are refused: {refused}") from None
    both = np.intersect1d(arrays.subject[split.train.indices], arrays.subject[split.test.indices])
    assert not len(both), f"subject {both[:1]} has training and test samples"


@SUITE.check
def hard_requests_are_met_or_refused(case: PartitionCase) -> None:
    """One client, small clients and too many clients are possible or refused with a ConfigError.

    Remedy: refuse impossible requests by fedbench.core.options.require.
    """
    full = example_data()
    for samples, clients in ((SAMPLES, 1), (40, 20), (20, 21)):  # one client, 2 samples each, more clients than samples
        arrays = Arrays(np.zeros((samples, 1), np.float32), full.targets[:samples], full.split[:samples], CLASSES)
        arrays.domain = np.zeros(samples, np.int64)
        try:
            num_clients = None if case.num_clients is None else clients  # None: the partition determines it
            build_split(arrays, case.make(), num_clients, case.seed)
        except ConfigError:
            continue
        except Exception as error:
            raise AssertionError(f"{clients} client(s) of {samples:,} samples: {describe_error(error)}") from error
