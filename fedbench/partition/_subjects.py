"""Splits by subject (patient): all samples of a subject are in the same part.

As in the breast-cancer case study (85/15 by patient, stratified by label).  Within a client, subjects are stratified by
their rarest label.  From each stratum, whole subjects are held out until its fraction is met as closely as possible.
"""

from collections.abc import Iterable

import numpy as np

from fedbench.core.options import ConfigError

UNDECIDED, TRAIN, HELD_OUT = -1, 0, 1


def split_by_subject(
    lists: Iterable[np.ndarray], fraction: float, labels: np.ndarray, subject: np.ndarray, rng: np.random.RandomState
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hold out about a fraction of each client's samples, by whole subjects (patients).

    A subject's rarest label is that of its labels that the fewest samples of the client have.  A stratum consists of a
    client's subjects with the same rarest label.  A stratum with several subjects has at least one in each part.  For a
    subject of several clients, the first of these clients determines the part.

    Args:
        lists: Sample indices of each client.
        fraction: Fraction of the samples of each stratum to hold out.
        labels: Label of each sample of the data set, [n] int64.
        subject: Subject of each sample of the data set, [n] int64.
        rng: The generator that orders the subjects of each stratum.

    Returns:
        Two lists with an array for each client: the samples held out, and the other samples.  Arrays keep the order of
        the client's list.
    """
    part = np.full(int(subject.max(initial=-1)) + 1, UNDECIDED, np.int8)  # [subjects]
    held_out, train = [], []
    for samples in lists:
        _assign_parts(labels[samples], subject[samples], fraction, part, rng)  # writes to part
        is_held_out = part[subject[samples]] == HELD_OUT  # [n_i]
        held_out.append(samples[is_held_out])
        train.append(samples[~is_held_out])
    return held_out, train


def _assign_parts(
    labels: np.ndarray, subject: np.ndarray, fraction: float, part: np.ndarray, rng: np.random.RandomState
) -> None:
    """Decide the parts of a client's subjects that no earlier client has decided, and write them to ``part``.

    A stratum consists of the client's subjects with the same rarest label (see `rarest_label`).  Its subjects are held
    out in random order until its fraction is met as closely as possible.  Of several subjects, at least one is held out
    and one is kept.

    Args:
        labels: Label of each sample of the client, [n_i].
        subject: Subject of each sample of the client, [n_i].
        fraction: Fraction of the samples of each stratum to hold out.
        part: UNDECIDED, TRAIN or HELD_OUT for each subject of the data set, changed in place.
        rng: The generator that orders the subjects of each stratum.
    """
    ids, inverse = np.unique(subject, return_inverse=True)  # [S] the client's subjects, [n_i] indices of ids
    sizes = np.bincount(inverse)  # [S], samples of each of the client's S subjects
    stratum = rarest_label(labels, inverse, len(ids))  # [S]
    to_hold_out = 0.0  # number of samples; the rounding error of a stratum is made up for by the next one
    for label in np.unique(stratum):
        members = rng.permutation(np.flatnonzero(stratum == label))  # indices of ids
        to_hold_out += fraction * sizes[members].sum()
        earlier = part[ids[members]]  # parts that earlier clients have decided, or UNDECIDED
        to_hold_out -= sizes[members[earlier == HELD_OUT]].sum()
        free = members[earlier == UNDECIDED]
        cumulative = np.concatenate(([0], np.cumsum(sizes[free])))  # samples of the first 0, 1, 2 ... free subjects
        least = int(len(members) > 1 and not (earlier == HELD_OUT).any())  # of several subjects, hold out one ...
        most = len(free) - int(len(members) > 1 and not (earlier == TRAIN).any())  # ... and keep one
        # hold out as many subjects as come closest to the number of samples
        count = int(np.clip(np.abs(cumulative - to_hold_out).argmin(), min(least, len(free)), max(most, 0)))
        part[ids[free[:count]]] = HELD_OUT
        part[ids[free[count:]]] = TRAIN
        to_hold_out -= cumulative[count]


def rarest_label(labels: np.ndarray, subject: np.ndarray, num_subjects: int) -> np.ndarray:
    """Return the rarest label of each subject: of its labels, the one that the fewest of all samples have.

    Args:
        labels: Label of each sample, [n].
        subject: Subject of each sample, [n], from 0 to num_subjects - 1.
        num_subjects: S.

    Returns:
        The index of this label among the sorted labels that occur, [S].
    """
    classes, label = np.unique(labels, return_inverse=True)
    frequency = np.bincount(label)  # [C]
    has_label = np.zeros((num_subjects, len(classes)), bool)  # [S, C]
    has_label[subject, label] = True
    return np.where(has_label, frequency, len(labels) + 1).argmin(1)  # n + 1: never the minimum


def check_subjects(parts: dict[str, np.ndarray], subject: np.ndarray) -> None:
    """Check that each subject (patient) is in one part only.

    Args:
        parts: Sample indices of all clients by part, such as "train".
        subject: Subject of each sample of the data set, [n].

    Raises:
        ConfigError: A subject has samples in two parts.
    """
    subjects: dict[str, np.ndarray] = {}
    for name, indices in parts.items():
        in_part = np.unique(subject[indices])
        for other, in_other in subjects.items():
            shared = np.intersect1d(in_part, in_other)
            if len(shared):
                raise ConfigError(
                    f"{len(shared):,} subjects (patients) have samples in both the {other} and the {name} part: use "
                    "dataset.split=merged, which splits by subject"
                )
        subjects[name] = in_part
