"""From a data set and a partition to who holds which sample: ragged index lists, hashed and saved.

A partition is a class with ``assign(labels, pools, num_clients, rng, domain)``; ``build_split`` chooses
the pools (the merged set, or the published parts), cuts each client's samples into train, validation and
test, and refuses whatever leaves a client with nothing to train or to be tested on.  One ``RandomState``
makes all draws, in an order that repeats the papers' code: assignment, test cuts in client order, then
validation cuts in client order.

Letters: N clients, C classes, n samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged, Split
from fedbench.data.base import EXTRA, TEST, TRAIN, VAL, Arrays
from fedbench.partition._extra import deal_extra
from fedbench.partition._subjects import cut_subjects, refuse_divided

SPLITS = ("merged", "published", "stratified")


def by_class(labels: np.ndarray, pool: np.ndarray) -> list[np.ndarray]:
    """The samples of a pool, one array per class that occurs anywhere in labels [n], in the pool's order."""
    return [pool[labels[pool] == c] for c in np.unique(labels)]


def deal(classes: list[np.ndarray], counts: np.ndarray) -> Ragged:
    """Client j gets the next ``counts[k, j]`` samples of each class k, in class order; the rest are left out.

    classes: C index arrays, already shuffled; counts [C, N] int64, whose rows sum to at most their lengths.
    """
    num_clients = counts.shape[1]
    owners = np.concatenate([np.repeat(np.arange(num_clients), c) for c in counts])  # [total]
    samples = np.concatenate([members[: c.sum()] for members, c in zip(classes, counts)])  # [total]
    return Ragged.from_owners(samples, owners, num_clients)


def deal_shares(
    labels: np.ndarray, pools: list[np.ndarray], shares: np.ndarray, rng: np.random.RandomState
) -> list[Ragged]:
    """Divide every pool by one matrix: client j gets floor(shares[k, j] n_k) shuffled samples of class k.

    shares [C, N], rows summing to at most 1.  The few samples that rounding leaves over stay out, as in
    APPLE's code.
    """
    dealt = []
    for pool in pools:
        classes = [rng.permutation(members) for members in by_class(labels, pool)]
        sizes = np.array([len(members) for members in classes])  # [C]
        dealt.append(deal(classes, (shares * sizes[:, None]).astype(np.int64)))
    return dealt


class Partition(Protocol):
    """A way to divide samples over clients."""

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> Sequence[Ragged | list[np.ndarray]]:
        """For each pool, the N clients' sample indices.

        labels [n] int64 and domain [n] int64 (or None) of the whole set; pools: index arrays into it, the
        first of which makes the draws (shares, caps, retries), the others being cut by the same shares.
        A method client_names(arrays), which is optional, returns the clients' names, or None.
        """
        ...


def build_split(
    arrays: Arrays,
    partition: Partition,
    num_clients: int | None,
    seed: int,
    split: str = "merged",
    test_fraction: float = 0.25,
    val_fraction: float = 0.0,
    subset: float = 1.0,
) -> Split:
    """Divide a data set over num_clients clients and cut each one's part; ConfigError where it cannot be.

    split: ``merged``: all samples are pooled, divided, and each client's are cut at random into train
        (floor((1 - test_fraction) n)) and test, as the PFL papers do; ``published``: train and test (and
        validation, where published) stay apart and are divided by the same shares; ``stratified``: all are
        pooled and cut once into train and test, keeping the classes' proportions, then as ``published``.
    num_clients: None lets a partition with natural silos say how many there are.
    val_fraction: this share of each client's train samples becomes its validation part; the published
        validation samples, if any, then count as train samples.
    subset: this share of every part that is divided is used at all, drawn from ``seed`` and keeping the
        proportions of classes and natural silos; the rest belongs to nobody.

    A subject of ``arrays`` (a patient) stays whole where clients' samples are cut.  Extra samples go to training
    parts only, last of all, so that the rest is drawn as it would be without them.
    """
    _check_options(arrays, split, test_fraction, val_fraction)
    num_clients = _client_count(arrays, partition, num_clients)
    ready = getattr(partition, "ready", None)
    if ready is not None and (split_of_file := ready(arrays)) is not None:
        return _checked(split_of_file, num_clients, arrays, partition)
    rng = np.random.RandomState(seed)
    labels = labels_for(partition, arrays)
    pools = _pools(arrays, labels, split, test_fraction, val_fraction, seed)
    if subset < 1:
        pools = _subsets(pools, labels, arrays.domain, subset, seed)
    for name, pool in zip(("train", "test"), pools):
        part = "samples" if split == "merged" else f"{name} samples"
        require(
            num_clients <= len(pool),
            f"partition.num_clients={num_clients:,} is more than the {len(pool):,} {part} there are",
        )
    assigned = [_as_ragged(r) for r in partition.assign(labels, pools, num_clients, rng, arrays.domain)]
    if split == "merged":
        _require_two(assigned[0], partition)
        test, train = _cut(assigned[0], test_fraction, rng, labels, arrays.subject)
    else:
        train, test = assigned[:2]
    val = assigned[2] if len(assigned) > 2 else Ragged.from_lists([np.empty(0, np.int64)] * num_clients)
    if val_fraction > 0:
        val, train = _cut(train, val_fraction, rng, labels, arrays.subject)
    extra = np.flatnonzero(arrays.split == EXTRA)
    if len(extra):
        extra = extra if subset == 1 else _subsets([extra], labels, arrays.domain, subset, seed)[0]
        train = _as_ragged(deal_extra([train[i] for i in range(num_clients)], extra, arrays.domain, rng))
    return _checked(Split(train, val, test), num_clients, arrays, partition)


def _checked(split: Split, num_clients: int, arrays: Arrays, partition: Partition) -> Split:
    """The split; ConfigError where somebody has nothing, or a sample (a subject) is in two places."""
    _check_split(split, num_clients, len(arrays), partition)
    if arrays.subject is not None:
        refuse_divided({k: getattr(split, k).indices for k in ("train", "val", "test")}, arrays.subject)
    named = getattr(partition, "client_names", None)
    return split if named is None else replace(split, names=_proper(named(arrays), num_clients))


def _proper(names: Sequence[str] | None, num_clients: int) -> tuple[str, ...] | None:
    """Return names without line breaks; None if they are the clients' numbers, or not one for each client."""
    shown = tuple(" ".join(str(name).split()) for name in names or ())
    return None if len(shown) != num_clients or shown == tuple(map(str, range(num_clients))) else shown


def labels_for(partition: Partition, arrays: Arrays) -> np.ndarray:
    """The label by which a partition divides each sample: its own `labels(arrays)` where it has such, else the task's.
    # [n] int64"""
    own = getattr(partition, "labels", None)
    return arrays.labels() if own is None else own(arrays)


def _check_options(arrays: Arrays, split: str, test_fraction: float, val_fraction: float) -> None:
    require(split in SPLITS, f"dataset.split={split!r} is not one of {', '.join(SPLITS)}")
    require(
        split == "published" or 0 < test_fraction < 1,
        f"dataset.test_fraction={test_fraction} must be between 0 and 1 (both excluded)",
    )
    require(0 <= val_fraction < 1, f"dataset.val_fraction={val_fraction} must be in [0, 1)")
    require(
        split != "published" or bool((arrays.split == TEST).any()),
        "dataset.split=published, but this data set has no published test part: use dataset.split=merged",
    )
    require(
        split != "published" or bool((arrays.split == TRAIN).any()),
        "dataset.split=published, but this data set has no published train part: use dataset.split=merged",
    )


def _client_count(arrays: Arrays, partition: Partition, num_clients: int | None) -> int:
    if num_clients is None:
        count = getattr(partition, "count", None)
        if count is None:
            raise ConfigError("partition.num_clients is null: this partition needs a number >= 1")
        return count(arrays.num_domains)
    require(num_clients >= 1, f"partition.num_clients={num_clients} must be >= 1")
    return num_clients


def _pools(
    arrays: Arrays, labels: np.ndarray, split: str, test_fraction: float, val_fraction: float, seed: int
) -> list[np.ndarray]:
    """The index arrays to divide: [all], [train, test] or [train, test, validation]."""
    part = arrays.split
    original = np.flatnonzero(part != EXTRA)
    if split == "merged":
        return [original]
    if split == "stratified":
        return [original[rows] for rows in _stratified(labels[original], test_fraction, seed)]
    if val_fraction > 0:
        return [original[part[original] != TEST], np.flatnonzero(part == TEST)]
    pools = [np.flatnonzero(part == which) for which in (TRAIN, TEST, VAL)]
    return pools if len(pools[2]) else pools[:2]


def _subsets(
    pools: list[np.ndarray], labels: np.ndarray, domain: np.ndarray | None, subset: float, seed: int
) -> list[np.ndarray]:
    """round(subset n_k) samples, one at least, of each class (of each natural silo) of each pool, in its order.

    With a generator of its own: what comes after draws as it would from the whole set.
    """
    require(0 < subset <= 1, f"dataset.subset={subset} must be in (0, 1]")
    rng = np.random.RandomState(seed)
    _, groups = np.unique(
        np.stack([labels, np.zeros_like(labels) if domain is None else domain]), axis=1, return_inverse=True
    )  # [n]
    kept = np.zeros(len(labels), bool)  # [n]
    for pool in pools:
        for members in by_class(groups.reshape(-1), pool):
            kept[rng.permutation(members)[: max(1, round(subset * len(members)))]] = True
    return [pool[kept[pool]] for pool in pools]


def _stratified(labels: np.ndarray, test_fraction: float, seed: int) -> list[np.ndarray]:
    """One cut of everything, class proportions kept: scikit-learn's, which APPLE's MedMNIST files used."""
    from sklearn.model_selection import train_test_split  # slow to import, rarely needed

    try:
        indices = np.arange(len(labels))
        train, test = train_test_split(indices, test_size=test_fraction, random_state=seed, stratify=labels)
    except ValueError as error:
        raise ConfigError(f"dataset.split=stratified cannot be met: {error}") from error
    return [np.asarray(train), np.asarray(test)]


def _as_ragged(lists: Ragged | Sequence[np.ndarray]) -> Ragged:
    return lists if isinstance(lists, Ragged) else Ragged.from_lists(lists)


def _cut(
    lists: Ragged, fraction: float, rng: np.random.RandomState, labels: np.ndarray, subject: np.ndarray | None
) -> tuple[Ragged, Ragged]:
    """Split every client's list at random: (n - floor((1 - fraction) n) samples, the rest, never empty).

    The first samples of each permutation are the part cut off, as scikit-learn's ShuffleSplit does.  Where samples
    are of subjects, whole subjects are cut off, stratified by label, and the sizes are as near as they allow.
    """
    if subject is not None:
        off, kept = cut_subjects([lists[i] for i in range(len(lists))], fraction, labels, subject, rng)
        return _as_ragged(off), _as_ragged(kept)
    sizes = lists.sizes  # [N]
    # 1e-9: (1 - 0.9) * 10 is 0.99999999, which is one sample all the same.
    kept = np.maximum(np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64), np.minimum(sizes, 1))
    shuffled = np.empty_like(lists.indices)
    bounds = lists.offsets.tolist()
    for start, stop in pairwise(bounds):
        shuffled[start:stop] = start + rng.permutation(stop - start)
    shuffled = lists.indices[shuffled]  # [total]
    off = lists.ranks() < np.repeat(sizes - kept, sizes)  # [total]
    return Ragged.from_sizes(shuffled[off], sizes - kept), Ragged.from_sizes(shuffled[~off], kept)


def _how_to_fill(partition: Partition) -> str:
    """Return advice on clients with too few samples."""
    if not hasattr(partition, "count"):
        return "lower partition.num_clients or make the partition more even"
    path = getattr(partition, "path", None)
    where = f" in partition.path={path}" if path is not None else ""
    return f"the partition says which clients there are{where}: give these more samples, or leave them out"


def _require_two(lists: Ragged, partition: Partition) -> None:
    """A client needs one sample to train on and one to be tested on."""
    few = np.flatnonzero(lists.sizes < 2)
    if len(few):
        raise ConfigError(
            f"{len(few):,} of {len(lists):,} clients (the first is client {few[0]}, with "
            f"{lists.sizes[few[0]]}) would hold fewer than 2 samples, too few to train and to test on: "
            f"{_how_to_fill(partition)}"
        )


def _check_split(split: Split, num_clients: int, num_samples: int, partition: Partition) -> None:
    """No client without train or test samples, no sample in two places."""
    name = type(partition).__name__
    for part in ("train", "test", "val"):
        lists: Ragged = getattr(split, part)
        require(len(lists) == num_clients, f"{name} gave {len(lists)} {part} lists for {num_clients} clients")
        empty = np.flatnonzero(lists.sizes == 0)
        require(
            part == "val" or len(empty) == 0,
            f"{len(empty):,} of {num_clients:,} clients (first: client {empty[0] if len(empty) else 0}) "
            f"would have no {part} samples: {_how_to_fill(partition)}",
        )
    everything = np.concatenate([split.train.indices, split.val.indices, split.test.indices])
    used = np.bincount(everything, minlength=num_samples)
    require(len(used) == num_samples, f"{name} names sample {len(used) - 1:,}, and the data set has {num_samples:,}")
    several = np.flatnonzero(used > 1)
    if len(several):
        held = ", ".join(_holders(split, int(several[0])))
        raise ConfigError(
            f"{name} gives {len(several):,} samples to more than one client or part: sample {several[0]} to {held}"
        )


def _holders(split: Split, sample: int) -> list[str]:
    """Describe which clients hold a sample, and in which part."""
    parts = {"train": split.train, "val": split.val, "test": split.test}
    return [f"client {i} ({part})" for part, lists in parts.items() for i in lists.owners()[lists.indices == sample]]
