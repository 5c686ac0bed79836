"""Cuts that keep a subject (a patient) whole: all of a subject's samples are on one side.

The case study's 85/15 by patient, stratified by label: within a client, the subjects whose rarest label is k make
stratum k, and of each stratum whole subjects are taken until its share is reached as nearly as they allow.
"""

from collections.abc import Iterable

import numpy as np

from fedbench.core.options import ConfigError

UNDECIDED, KEPT, OFF = -1, 0, 1


def cut_subjects(
    lists: Iterable[np.ndarray], fraction: float, labels: np.ndarray, subject: np.ndarray, rng: np.random.RandomState
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per client, the part cut off (about the fraction of every stratum) and the rest, in the list's order.

    lists: the clients' samples; labels, subject [n] int64 of the whole set.  A stratum of two subjects or more has
    one on either side.  A subject that several clients share goes where the first of them puts it.
    """
    side = np.full(int(subject.max(initial=-1)) + 1, UNDECIDED, np.int8)  # [subjects]
    off, kept = [], []
    for mine in lists:
        decide(labels[mine], subject[mine], fraction, side, rng)
        chosen = side[subject[mine]] == OFF  # [n_i]
        off.append(mine[chosen])
        kept.append(mine[~chosen])
    return off, kept


def decide(
    labels: np.ndarray, subject: np.ndarray, fraction: float, side: np.ndarray, rng: np.random.RandomState
) -> None:
    """Write into side [subjects] where those of a client's samples [n_i] go that are undecided yet."""
    ids, of = np.unique(subject, return_inverse=True)  # [S], [n_i]
    sizes = np.bincount(of)  # [S]
    stratum = rarest_label(labels, of, len(ids))  # [S]
    owed = 0.0  # samples by which the part cut off is behind; strata make up for one another's rounding
    for k in np.unique(stratum):
        members = rng.permutation(np.flatnonzero(stratum == k))
        owed += fraction * sizes[members].sum()
        before = side[ids[members]]
        owed -= sizes[members[before == OFF]].sum()
        free = members[before == UNDECIDED]
        reach = np.concatenate(([0], np.cumsum(sizes[free])))  # of the first 0, 1, 2 ... of them
        least = int(len(members) > 1 and not (before == OFF).any())
        most = len(free) - int(len(members) > 1 and not (before == KEPT).any())
        taken = int(np.clip(np.abs(reach - owed).argmin(), min(least, len(free)), max(most, 0)))
        side[ids[free[:taken]]], side[ids[free[taken:]]] = OFF, KEPT
        owed -= reach[taken]


def rarest_label(labels: np.ndarray, of: np.ndarray, num_subjects: int) -> np.ndarray:
    """For each subject, of its labels the one fewest samples have, [S]; of [n] the subject of each sample."""
    classes, label = np.unique(labels, return_inverse=True)
    common = np.bincount(label)  # [C]
    has = np.zeros((num_subjects, len(classes)), bool)  # [S, C]
    has[of, label] = True
    return np.where(has, common, len(labels) + 1).argmin(1)


def refuse_divided(parts: dict[str, np.ndarray], subject: np.ndarray) -> None:
    """ConfigError for a subject with samples in two parts; parts: name -> sample indices."""
    first: dict[str, np.ndarray] = {}
    for name, indices in parts.items():
        mine = np.unique(subject[indices])
        for other, theirs in first.items():
            both = np.intersect1d(mine, theirs)
            if len(both):
                raise ConfigError(
                    f"{len(both):,} subjects (patients) would be in both the {other} and the {name} part: use "
                    "dataset.split=merged, which keeps them whole"
                )
        first[name] = mine
