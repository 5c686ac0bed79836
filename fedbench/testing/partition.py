"""What every partition keeps: no sample twice, nobody empty, the same for a seed.

A partition divides 1,800 samples of 10 classes and 4 natural silos, of 900 subjects, every fifth published as test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbench.core.error_text import describe_error
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged, Split
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.partition.base import build_split, partition_labels
from fedbench.simulation.instantiate import make
from fedbench.testing import _probes as probes
from fedbench.testing._suite import Broken, Report, Skipped, Suite
from fedbench.testing._targets import Target, described, path_of

SAMPLES, CLASSES, SILOS, CLIENTS = 1800, 10, 4, 10
RESERVED = ("num_clients", "seed")


@dataclass
class PartitionCase:
    """A partition, the number of clients that it is asked for (None: it says itself), and a seed."""

    values: dict[str, Any]
    num_clients: int | None
    seed: int = 1

    def make(self) -> Any:
        """A new one."""
        return make(self.values, RESERVED)

    def split(self, how: str = "merged", seed: int | None = None, arrays: Arrays | None = None) -> Split:
        """The data set divided over the clients."""
        arrays = example() if arrays is None else arrays
        return build_split(arrays, self.make(), self.num_clients, self.seed if seed is None else seed, how)

    def assign(self, arrays: Arrays, pools: list[np.ndarray]) -> list[Ragged]:
        """What its `assign` gives for these pools."""
        partition, rng = self.make(), np.random.RandomState(self.seed)
        n = partition.count(arrays.num_domains) if self.num_clients is None else self.num_clients
        lists = partition.assign(partition_labels(partition, arrays), pools, n, rng, arrays.domain)
        return [each if isinstance(each, Ragged) else Ragged.from_lists(each) for each in lists]


SUITE: Suite[PartitionCase] = Suite("partition")


def check_partition(
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    num_clients: int | None = CLIENTS,
    only: Iterable[str] | None = None,
) -> Report:
    """Check a partition: a class, its dotted path, or the name of an option of conf/partition.

    options: of its constructor.  num_clients: that it is asked for; a partition with `default_num_clients` says so
    itself.  only: the names of some checks.  ConfigError where it cannot be built.
    """
    case = case_for(target, options, num_clients)
    clients = "as many clients as it makes" if case.num_clients is None else f"{case.num_clients} clients"
    setting = f"for {clients} on {SAMPLES:,} samples of {CLASSES} classes in {SILOS} silos"
    return SUITE.run(path_of(target), setting, case, only)


def case_for(
    target: Target, options: Mapping[str, Any] | None = None, num_clients: int | None = CLIENTS
) -> PartitionCase:
    """The partition, and what it is asked for; ConfigError where it cannot be built, or is none."""
    values = described("partition", target, options)
    seed, wanted = values.pop("seed", 1), values.pop("num_clients", num_clients)
    case = PartitionCase(values, wanted, seed)
    partition = case.make()
    require(callable(getattr(partition, "assign", None)), f"{path_of(target)} is no partition, which has assign(...)")
    if wanted is not None and "num_clients" not in (options or {}) and hasattr(partition, "default_num_clients"):
        case.num_clients = None
    return case


def example() -> Arrays:
    """The data set: only labels, silos and the published split count."""
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(SAMPLES) % CLASSES).astype(np.int64)
    part = np.where(np.arange(SAMPLES) % 5 == 0, TEST, TRAIN).astype(np.int8)
    return Arrays(np.zeros((SAMPLES, 1), np.float32), y, part, CLASSES, domain=rng.integers(0, SILOS, SAMPLES))


def _pools(arrays: Arrays) -> list[np.ndarray]:
    return [np.flatnonzero(arrays.split == which) for which in (TRAIN, TEST)]


# -- the checks ------------------------------------------------------------------------------------------
@SUITE.check
def every_sample_once(case: PartitionCase) -> None:
    """Every sample is given to one client, but for what rounding leaves out."""
    arrays = example()
    for pools in ([np.arange(SAMPLES)], _pools(arrays)):
        dealt = case.assign(arrays, [pool.copy() for pool in pools])
        if len(dealt) != len(pools):
            raise Broken(f"`assign` gives {len(dealt)} divisions for {len(pools)} pools: one list of clients for each")
        for pool, lists in zip(pools, dealt):
            _once(case, pool, lists)


def _once(case: PartitionCase, pool: np.ndarray, lists: Ragged) -> None:
    used, foreign = np.sort(lists.indices), np.setdiff1d(lists.indices, pool)
    if len(foreign):
        raise Broken(f"sample {foreign[0]} is given away and is not in the pool: indices are those of the pool given")
    twice = used[1:][used[1:] == used[:-1]]
    if len(twice):
        raise Broken(f"sample {twice[0]} is given away twice ({len(twice):,} such in all)")
    left, rounding = len(pool) - len(used), 2 * CLASSES * len(lists)
    if left > rounding and not getattr(case.make(), "leaves_samples_out", False):
        raise Broken(
            f"{left:,} of {len(pool):,} samples are given to nobody: deal them all, or say that this is meant by "
            "leaves_samples_out = True on the class"
        )


@SUITE.check
def nobody_is_empty(case: PartitionCase) -> None:
    """Every client has something to train on and to be tested on."""
    for how in ("merged", "published"):
        try:
            case.split(how)
        except ConfigError as refused:
            raise Broken(f"dataset.split={how}: {refused}") from None


@SUITE.check
def sizes_are_kept(case: PartitionCase) -> None:
    """No client has fewer samples than its options min_size and min_test promise."""
    partition = case.make()
    limits = {name: getattr(partition, name) for name in ("min_size", "min_test") if hasattr(partition, name)}
    if not limits:
        raise Skipped("it has no options min_size and min_test")
    arrays = example()
    for name, lists in zip(("min_size", "min_test"), case.assign(arrays, _pools(arrays))):
        if name in limits and lists.sizes.min() < limits[name]:
            raise Broken(f"{name}={limits[name]}, and a client has {lists.sizes.min()} samples")


@SUITE.check
def a_seed_repeats(case: PartitionCase) -> None:
    """The same seed gives the same clients, to the byte."""
    if case.split().hash != case.split().hash:
        raise Broken("the same seed gives another partition: draw from the generator that `assign` is given, alone")


@SUITE.check
def no_global_generator(case: PartitionCase) -> None:
    """The global generators of NumPy, torch and Python are not moved nor read."""
    expected = case.split().hash
    with probes.other_generators(12345):
        before = probes.global_generators()
        found = case.split().hash
        moved = probes.moved_generators(before)
    if moved or found != expected:
        how = f"draws from the global generator of {' and '.join(moved)}" if moved else "reads a global generator"
        raise Broken(f"`assign` {how}: draw from `rng`, the generator that it is given")


@SUITE.check
def inputs_are_unchanged(case: PartitionCase) -> None:
    """Labels, pools and silos are as they were after `assign`."""
    arrays, other = example(), example()
    pools = _pools(arrays)
    case.assign(arrays, pools)
    pairs = [("labels", arrays.targets, other.targets), ("domain", arrays.domain, other.domain)]
    pairs += [("a pool", mine, yours) for mine, yours in zip(pools, _pools(other))]
    for name, now, before in pairs:
        if not np.array_equal(now, before):  # type: ignore[arg-type]
            raise Broken(f"`assign` changes {name} in place: shuffle a copy (rng.permutation, not rng.shuffle)")


@SUITE.check
def published_parts_stay_apart(case: PartitionCase) -> None:
    """Published training and test samples stay what they are."""
    arrays = example()
    split = case.split("published", arrays=arrays)
    if (arrays.split[split.train.indices] != TRAIN).any() or (arrays.split[split.test.indices] != TEST).any():
        raise Broken("samples of one pool are given out as the other's: the i-th division is of the i-th pool")


@SUITE.check
def subjects_stay_whole(case: PartitionCase) -> None:
    """Nobody (no patient) is both trained and tested on."""
    arrays = example()
    arrays.subject = np.arange(SAMPLES) // 2
    try:
        split = case.split(arrays=arrays)
    except ConfigError as refused:
        raise Skipped(f"it divides a subject between clients, and is refused on such data: {refused}") from None
    parts = [set(arrays.subject[getattr(split, part).indices].tolist()) for part in ("train", "test")]
    if parts[0] & parts[1]:
        raise Broken(f"subject {min(parts[0] & parts[1])} is trained and tested on")


@SUITE.check
def hard_requests_are_met_or_refused(case: PartitionCase) -> None:
    """One client, tiny clients and too many are met, or refused in one sentence."""
    whole = example()
    for samples, clients in ((SAMPLES, 1), (40, 20), (20, 21)):
        few = Arrays(np.zeros((samples, 1), np.float32), whole.targets[:samples], whole.split[:samples], CLASSES)
        few.domain = np.zeros(samples, np.int64)
        try:
            build_split(few, case.make(), None if case.num_clients is None else clients, case.seed)
        except ConfigError:
            continue
        except Exception as error:
            raise Broken(
                f"{clients} client(s) of {samples:,} samples: {describe_error(error)}; refuse what cannot be had by "
                "fedbench.core.options.require"
            ) from error
