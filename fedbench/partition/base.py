"""Build the split of a data set from a partition: training, validation and test samples of each client.

A partition is a class with ``assign(labels, pools, num_clients, rng, domain)``.  ``build_split`` passes it all samples,
or the published parts (pools).  It then splits each client's samples, and refuses clients without training or test
samples.  One ``RandomState`` draws all random numbers in the order of the papers' code: the partition, test parts in
client order, validation parts in client order.

Letters: N clients, C classes, n samples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.core.renamed import refuse_old_names
from fedbench.core.split import Ragged, Split
from fedbench.data.base import EXTRA, TEST, TRAIN, VAL, Arrays
from fedbench.partition._extra import add_extra
from fedbench.partition._subjects import check_subjects, split_by_subject

SPLITS = ("merged", "published", "stratified")
OLD_NAMES = {"count": "default_num_clients", "ready": "predefined_split", "leaves_out": "leaves_samples_out"}


def group_by_class(labels: np.ndarray, pool: np.ndarray) -> list[np.ndarray]:
    """Divide a set of samples by class.

    Args:
        labels: Label of each sample of the data set, [n].
        pool: Indices of the samples to divide.

    Returns:
        The sample indices of each class of the data set, in ascending order of the classes.  An array is empty if the
        pool has no sample of the class.  Samples of a class keep their order.
    """
    return [pool[labels[pool] == c] for c in np.unique(labels)]


def assign_by_counts(classes: list[np.ndarray], counts: np.ndarray) -> Ragged:
    """Divide each class in order: the first samples go to client 0, the next ones to client 1, and so on.

    Samples beyond the counts are not assigned.

    Args:
        classes: Shuffled sample indices of each class, C arrays.
        counts: counts[k, j] is the number of samples of class k for client j, [C, N] int64.

    Returns:
        A Ragged: the sample indices of each of the N clients, in the order of the classes.
    """
    num_clients = counts.shape[1]
    clients = np.concatenate([np.repeat(np.arange(num_clients), row) for row in counts])  # [total]
    samples = np.concatenate([members[: row.sum()] for members, row in zip(classes, counts)])  # [total]
    return Ragged.from_owners(samples, clients, num_clients)


def assign_by_shares(
    labels: np.ndarray, pools: list[np.ndarray], shares: np.ndarray, rng: np.random.RandomState
) -> list[Ragged]:
    """Divide the classes of each pool by the same shares: client j gets floor(shares[k, j] n_k) samples of class k.

    n_k is the number of samples of class k in the pool.  The few samples that rounding leaves are not assigned, as in
    the code of APPLE (Luo and Wu, IJCAI 2022).

    Args:
        labels: Label of each sample of the data set, [n].
        pools: Sample indices of each pool (all samples, or for example the training and the test samples).
        shares: shares[k, j] is the fraction of class k for client j, [C, N].  Rows sum to at most 1.
        rng: The generator that shuffles each class.

    Returns:
        For each pool, a Ragged: the sample indices of each of the N clients.
    """
    assigned = []
    for pool in pools:
        classes = [rng.permutation(members) for members in group_by_class(labels, pool)]
        sizes = np.array([len(members) for members in classes])  # [C]
        assigned.append(assign_by_counts(classes, (shares * sizes[:, None]).astype(np.int64)))
    return assigned


def floor_counts(counts: np.ndarray) -> np.ndarray:
    """Return counts rounded down, as int64 of the same shape.

    1e-9 is added first, because floating point gives 28.999999999999996 for 0.29 * 100, which must become 29.
    """
    return np.floor(counts + 1e-9).astype(np.int64)


class Partition(Protocol):
    """A rule that assigns samples to clients.

    A class may also have:

    - ``default_num_clients(num_domains)``: N if partition.num_clients is null.
    - ``client_names(arrays)``: the names of the clients, or None.
    - ``labels(arrays)``: the labels to partition by, [n] int64, if they are not those of the task.
    - ``predefined_split(arrays)``: a complete Split, or None to call ``assign``.
    - ``leaves_samples_out = True``: samples remain unassigned on purpose, beyond rounding.
    """

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> Sequence[Ragged | list[np.ndarray]]:
        """Return the sample indices of each client, for each pool.

        Args:
            labels: Label of each sample of the data set, [n] int64.
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
                A client gets the same random shares of every pool; they are drawn for the first one.
            num_clients: N.
            rng: The only source of random numbers.
            domain: The client site of each sample of the data set, [n] int64, or None.

        Returns:
            For each pool, N arrays of sample indices, one for each client.

        Raises:
            ConfigError: The samples do not suffice, or an option does not fit the data set.
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
    """Divide a data set over clients, and each client's samples into training, validation and test parts.

    Samples of a subject (a patient) stay in one part.  Extra samples are added to training parts last, and do not
    change the other parts.

    Args:
        arrays: The data set.
        partition: The partition.
        num_clients: N.  None: the partition determines it.
        seed: Seed of all random numbers.
        split: One of

            - merged: Divide all samples, and split each client's samples at random: floor((1 - test_fraction) n) for
              training, as in the papers.
            - published: Divide the published training, test and validation samples separately, by the same shares.
            - stratified: Split all samples into training and test, stratified by class, and divide both as published.

        test_fraction: Fraction of the test samples, unless published.
        val_fraction: Fraction of each client's training samples for validation.  If positive, published validation
            samples are first added to the training samples.
        subset: Fraction of all samples to use, stratified by class and client site.

    Returns:
        The training, validation and test samples of each client, and the names of the clients if the partition has
        any.  Validation parts are empty if there is no published validation part and val_fraction is 0.

    Raises:
        ConfigError: The request cannot be met.
    """
    _check_options(arrays, split, test_fraction, val_fraction)
    refuse_old_names(type(partition), OLD_NAMES)
    num_clients = _client_count(arrays, partition, num_clients)
    predefined_split = getattr(partition, "predefined_split", None)
    if predefined_split is not None and (complete := predefined_split(arrays)) is not None:
        return _checked(complete, num_clients, arrays, partition)
    rng = np.random.RandomState(seed)
    labels = partition_labels(partition, arrays)
    pools = _pools(arrays, labels, split, test_fraction, val_fraction, seed)
    if subset < 1:
        pools = _subsample(pools, labels, arrays.domain, subset, seed)
    for part, pool in zip(("train", "test"), pools):
        unit = "samples" if split == "merged" else f"{part} samples"
        require(
            num_clients <= len(pool),
            f"partition.num_clients={num_clients:,} must be at most the number of {unit}, {len(pool):,}: lower it",
        )
    assigned = [_as_ragged(lists) for lists in partition.assign(labels, pools, num_clients, rng, arrays.domain)]
    if split == "merged":
        _require_two(assigned[0], partition)
        test, train = _hold_out(assigned[0], test_fraction, rng, labels, arrays.subject)
    else:
        train, test = assigned[:2]
    val = assigned[2] if len(assigned) > 2 else Ragged.from_lists([np.empty(0, np.int64)] * num_clients)
    if val_fraction > 0:
        val, train = _hold_out(train, val_fraction, rng, labels, arrays.subject)
    extra = np.flatnonzero(arrays.split == EXTRA)
    if len(extra):
        extra = extra if subset == 1 else _subsample([extra], labels, arrays.domain, subset, seed)[0]
        train = _as_ragged(add_extra([train[i] for i in range(num_clients)], extra, arrays.domain, rng))
    return _checked(Split(train, val, test), num_clients, arrays, partition)


def _checked(split: Split, num_clients: int, arrays: Arrays, partition: Partition) -> Split:
    """Check a split, and add the names of the clients if the partition has any.

    Args:
        split: The samples of each client.
        num_clients: N.
        arrays: The data set.
        partition: The partition that made the split.

    Returns:
        The split with its names.

    Raises:
        ConfigError: A client has no training or test samples, a sample is assigned twice, or a subject is in two parts.
    """
    _check_split(split, num_clients, len(arrays), partition)
    if arrays.subject is not None:
        check_subjects({part: getattr(split, part).indices for part in ("train", "val", "test")}, arrays.subject)
    client_names = getattr(partition, "client_names", None)
    return split if client_names is None else replace(split, names=_clean_names(client_names(arrays), num_clients))


def _clean_names(names: Sequence[str] | None, num_clients: int) -> tuple[str, ...] | None:
    """Return the names of the clients as they are stored in a split.

    Args:
        names: The names, or None.
        num_clients: N.

    Returns:
        N names without line breaks.  None if there are not N names, or if they only repeat the indices 0 to N - 1.
    """
    cleaned = tuple(" ".join(str(name).split()) for name in names or ())
    are_indices = cleaned == tuple(map(str, range(num_clients)))
    return None if len(cleaned) != num_clients or are_indices else cleaned


def partition_labels(partition: Partition, arrays: Arrays) -> np.ndarray:
    """Return the label of each sample by which a partition divides the data set.  # [n] int64

    They are ``partition.labels(arrays)`` if the partition has this method, else the labels that the task defines.
    """
    labels = getattr(partition, "labels", None)
    return arrays.labels() if labels is None else labels(arrays)


def _check_options(arrays: Arrays, split: str, test_fraction: float, val_fraction: float) -> None:
    """Check options of a split.

    Args:
        arrays: The data set.
        split: The option dataset.split: "merged" (divide all samples over the clients, then each client's into training
            and test), "published" (use the test samples of the data set) or "stratified" (divide by class first).
        test_fraction: Fraction of the test samples, not used with "published".
        val_fraction: Fraction of each client's training samples for validation.

    Raises:
        ConfigError: An option is out of range, or split is "published" and the data set has no published split.
    """
    require(split in SPLITS, f"dataset.split={split!r} is unknown: set it to one of {', '.join(SPLITS)}")
    require(
        split == "published" or 0 < test_fraction < 1,
        f"dataset.test_fraction={test_fraction} must be between 0 and 1 (both excluded): set it to 0.25, for example",
    )
    require(0 <= val_fraction < 1, f"dataset.val_fraction={val_fraction} must be in [0, 1): set it to 0 for none")
    for code, part in ((TEST, "test"), (TRAIN, "train")):
        require(
            split != "published" or bool((arrays.split == code).any()),
            f"dataset.split=published, but this data set has no published {part} part: use dataset.split=merged",
        )


def _client_count(arrays: Arrays, partition: Partition, num_clients: int | None) -> int:
    """Return the number of clients.

    Args:
        arrays: The data set.
        partition: The partition, which may determine the number (``default_num_clients``).
        num_clients: The option partition.num_clients.  None: the partition determines the number.

    Raises:
        ConfigError: num_clients is not positive, or is None and the partition does not determine the number.
    """
    if num_clients is None:
        default_num_clients = getattr(partition, "default_num_clients", None)
        if default_num_clients is None:
            raise ConfigError(
                "partition.num_clients is null, but this partition does not determine the number of clients: set it "
                "to a number >= 1"
            )
        return default_num_clients(arrays.num_domains)
    require(num_clients >= 1, f"partition.num_clients={num_clients} must be >= 1: raise it")
    return num_clients


def _pools(
    arrays: Arrays, labels: np.ndarray, split: str, test_fraction: float, val_fraction: float, seed: int
) -> list[np.ndarray]:
    """Return the pools of samples that the partition divides, without the extra samples.

    Args:
        arrays: The data set.
        labels: The label of each sample to stratify by, [n].
        split: "merged": one pool of all samples.  "published": the published training, test and validation samples.
            "stratified": training and test samples, split by label.
        test_fraction: Fraction of test samples, used by "stratified".
        val_fraction: The fraction of training samples that become validation samples later.  If it is positive, the
            published validation samples are put into the training pool.
        seed: Seed of the stratified split.

    Returns:
        Sample indices: [all] for "merged", else [train, test] or, with a published validation part, [train, test,
        validation].
    """
    part = arrays.split  # [n]: TRAIN, VAL, TEST or EXTRA
    regular = np.flatnonzero(part != EXTRA)  # extra samples are added to training parts later
    if split == "merged":
        return [regular]
    if split == "stratified":
        return [regular[positions] for positions in _stratified_split(labels[regular], test_fraction, seed)]
    if val_fraction > 0:
        return [regular[part[regular] != TEST], np.flatnonzero(part == TEST)]
    pools = [np.flatnonzero(part == code) for code in (TRAIN, TEST, VAL)]
    return pools if len(pools[2]) else pools[:2]


def _subsample(
    pools: list[np.ndarray], labels: np.ndarray, domain: np.ndarray | None, subset: float, seed: int
) -> list[np.ndarray]:
    """Return a random part of each pool, stratified by class and client site (hospital, user).

    Args:
        pools: Sample indices of each pool, such as the training and the test samples.
        labels: Label of each sample of the data set, [n].
        domain: Client site of each sample of the data set, [n], or None.
        subset: Fraction to return: round(subset n_k) of the n_k samples of a class of a site in a pool, at least one.
        seed: Seed of a generator of its own, so that the random numbers of the partition do not depend on the subset.

    Returns:
        The chosen sample indices of each pool, in the pool's order.
    """
    require(0 < subset <= 1, f"dataset.subset={subset} must be in (0, 1]: set it to 1 for all samples")
    rng = np.random.RandomState(seed)
    label_and_site = np.stack([labels, np.zeros_like(labels) if domain is None else domain])  # [2, n]
    _, groups = np.unique(label_and_site, axis=1, return_inverse=True)  # [n], one group for each pair
    used = np.zeros(len(labels), bool)  # [n]
    for pool in pools:
        for members in group_by_class(groups.reshape(-1), pool):  # some versions of NumPy return groups as [1, n]
            used[rng.permutation(members)[: max(1, round(subset * len(members)))]] = True
    return [pool[used[pool]] for pool in pools]


def _stratified_split(labels: np.ndarray, test_fraction: float, seed: int) -> list[np.ndarray]:
    """Split samples into training and test, stratified by label, by scikit-learn as in APPLE's MedMNIST files.

    Args:
        labels: Label of each sample, [n].
        test_fraction: Fraction of test samples.
        seed: Seed of the split.

    Returns:
        The positions of the training samples and of the test samples, 0 to n - 1.
    """
    from sklearn.model_selection import train_test_split  # slow to import, rarely needed

    positions = np.arange(len(labels))
    try:
        train, test = train_test_split(positions, test_size=test_fraction, random_state=seed, stratify=labels)
    except ValueError as error:
        raise ConfigError(
            f"dataset.split=stratified with dataset.test_fraction={test_fraction} is not possible: {error}: change "
            "test_fraction, or use dataset.split=merged"
        ) from error
    return [np.asarray(train), np.asarray(test)]


def _as_ragged(lists: Ragged | Sequence[np.ndarray]) -> Ragged:
    """Return a Ragged: the sample indices of all clients in one array, with the offset where each client begins.

    Args:
        lists: One array of sample indices per client, or a Ragged, which is returned unchanged.
    """
    return lists if isinstance(lists, Ragged) else Ragged.from_lists(lists)


def _hold_out(
    lists: Ragged, fraction: float, rng: np.random.RandomState, labels: np.ndarray, subject: np.ndarray | None
) -> tuple[Ragged, Ragged]:
    """Hold out a fraction of each client's samples at random.

    Of n samples, floor((1 - fraction) n) are kept, at least one if n > 0.  The first of each permutation are held out,
    as in scikit-learn's ShuffleSplit.  With subjects, whole subjects are held out.

    Args:
        lists: Sample indices of each of the N clients.
        fraction: Fraction to hold out.
        rng: The generator of the permutations, one for each client in their order.
        labels: Label of each sample of the data set, [n], used only with subjects, which are stratified by it.
        subject: Subject (patient) of each sample of the data set, [n], or None.

    Returns:
        The samples held out, and the samples kept, of each client.
    """
    if subject is not None:
        parts = split_by_subject([lists[i] for i in range(len(lists))], fraction, labels, subject, rng)
        return _as_ragged(parts[0]), _as_ragged(parts[1])
    sizes = lists.sizes  # [N], samples of each client
    num_kept = np.maximum(floor_counts((1 - fraction) * sizes), np.minimum(sizes, 1))  # [N]
    positions = np.empty_like(lists.indices)  # of the shuffled samples in lists.indices, which joins all lists
    for start, stop in pairwise(lists.offsets.tolist()):
        positions[start:stop] = start + rng.permutation(stop - start)
    shuffled = lists.indices[positions]  # [total]
    is_held_out = lists.ranks() < np.repeat(sizes - num_kept, sizes)  # [total]; a rank is a position in a client's list
    held_out = Ragged.from_sizes(shuffled[is_held_out], sizes - num_kept)
    return held_out, Ragged.from_sizes(shuffled[~is_held_out], num_kept)


def _advice(partition: Partition) -> str:
    """Return what the user can do about clients with too few samples, as the end of an error message.

    It depends on whether the partition itself determines the clients, and on whether it has the option alpha, counts or
    path.
    """
    if not hasattr(partition, "default_num_clients"):  # the number of clients is the user's choice alone
        return "lower partition.num_clients, " + (
            "or raise partition.alpha for more even sizes"
            if hasattr(partition, "alpha")
            else "or choose another partition"
        )
    if getattr(partition, "counts", None) is not None:
        return "raise their numbers in partition.counts"
    path = getattr(partition, "path", None)
    where = f"partition.path={path}" if path is not None else "the data set"
    return f"give these clients more samples in {where}, or leave them out there"


def _require_two(lists: Ragged, partition: Partition) -> None:
    """Check that each client has at least two samples: one for training and one for testing.

    Args:
        lists: Sample indices of each client.
        partition: The partition that made the lists, for the advice in the message.

    Raises:
        ConfigError: A client has fewer than two samples.
    """
    small = np.flatnonzero(lists.sizes < 2)
    if len(small):
        raise ConfigError(
            f"{len(small):,} of {len(lists):,} clients (the first is client {small[0]}, with "
            f"{lists.sizes[small[0]]}) would have fewer than 2 samples, too few for training and testing: "
            f"{_advice(partition)}"
        )


def _check_split(split: Split, num_clients: int, num_samples: int, partition: Partition) -> None:
    """Check that each client has training and test samples, and that no sample is assigned twice.

    Args:
        split: The samples of each client.
        num_clients: N.
        num_samples: The number of samples of the data set.
        partition: The partition, for messages.

    Raises:
        ConfigError: A part has not N lists, a client has no training or test samples, or a sample is assigned twice or
            is not in the data set.
    """
    partition_name = type(partition).__name__
    for part in ("train", "test", "val"):
        lists: Ragged = getattr(split, part)
        require(
            len(lists) == num_clients,
            f"the partition {partition_name} returned {len(lists)} {part} lists for {num_clients} clients: return one "
            "for each client",
        )
        empty = np.flatnonzero(lists.sizes == 0)
        if part != "val" and len(empty):
            raise ConfigError(
                f"{len(empty):,} of {num_clients:,} clients (the first is client {empty[0]}) would have no {part} "
                f"samples: {_advice(partition)}"
            )
    assigned = np.concatenate([split.train.indices, split.val.indices, split.test.indices])
    times = np.bincount(assigned, minlength=num_samples)  # longer than num_samples if an index is too large
    require(
        len(times) == num_samples,
        f"the partition {partition_name} assigned sample {len(times) - 1:,}, but this data set has samples 0 to "
        f"{num_samples - 1:,}: return only indices of the argument pools",
    )
    repeated = np.flatnonzero(times > 1)
    if len(repeated):
        sample = int(repeated[0])
        raise ConfigError(
            f"the partition {partition_name} assigned {len(repeated):,} samples to more than one client or part, for "
            f"example sample {sample} to {', '.join(_find_sample(split, sample))}: assign each sample at most once"
        )


def _find_sample(split: Split, sample: int) -> list[str]:
    """Return all clients and parts that contain a sample (an index), such as ["client 3 (train)"]; [] if none."""
    parts = {"train": split.train, "val": split.val, "test": split.test}
    return [f"client {i} ({part})" for part, lists in parts.items() for i in lists.owners()[lists.indices == sample]]
