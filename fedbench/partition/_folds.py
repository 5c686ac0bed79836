"""Cross-validation: one of k folds of each client's training samples becomes its validation part.

Test parts do not change.  A hyperparameter can thus be selected by k runs, one per fold, without test data.

Letters: N clients, k folds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedbench.core.options import require
from fedbench.core.split import Ragged, Split
from fedbench.data.base import EXTRA, Arrays


def hold_out_fold(split: Split, arrays: Arrays, folds: int, fold: int, seed: int) -> Split:
    """Return a split in which one fold of each client's training samples is its validation part.

    Folds are stratified by label, and their sizes differ by at most one sample of each class.  All samples of a subject
    are in one fold.  Subjects are stratified by the label of their first sample.  Extra samples are in no fold.  The
    validation part of a client with fewer samples (or subjects) than folds may be empty.

    Args:
        split: A split without validation parts.
        arrays: The data set.
        folds: k, the number of folds.
        fold: The fold of the validation part, 0 to k - 1.
        seed: Seed of the folds.

    Returns:
        The split with the same test parts, where fold number ``fold`` has moved from the training to the validation
        part of each client.

    Raises:
        ConfigError: The fold does not exist, there already are validation parts, or a client would not have training
            samples.
    """
    require(fold < folds, f"fold={fold} must be one of the {folds} folds, 0 to {folds - 1}: lower fold or raise folds")
    require(
        len(split.val.indices) == 0,
        f"folds={folds} divides the training parts, but there already are validation parts: set "
        "dataset.val_fraction=0, and use a dataset.split without published validation samples",
    )
    labels = arrays.labels()
    rng = np.random.RandomState(seed)
    train, val = [], []
    for i in range(split.num_clients):
        samples = split.train[i]
        in_fold = _assign_folds(samples, arrays, labels, folds, rng) == fold  # [n_i]
        require(
            not in_fold.all(),
            f"folds={folds}: client {i} has {len(samples)} training sample(s), and all would be in its validation "
            f"fold {fold}: give it more samples (or subjects), for example by a lower partition.num_clients",
        )
        train.append(samples[~in_fold])
        val.append(samples[in_fold])
    return replace(split, train=Ragged.from_lists(train), val=Ragged.from_lists(val))


def _assign_folds(
    samples: np.ndarray, arrays: Arrays, labels: np.ndarray, folds: int, rng: np.random.RandomState
) -> np.ndarray:
    """Assign the samples of one client to folds, stratified by label and without dividing subjects (patients).

    Args:
        samples: Indices of the client's training samples, [n_i].
        arrays: The data set.
        labels: Label of each sample of the data set, [n].
        folds: k, the number of folds.
        rng: The generator that orders the subjects (or samples) of each label at random.

    Returns:
        The fold of each sample, 0 to k - 1, and -1 for extra samples, [n_i].
    """
    is_regular = arrays.split[samples] != EXTRA  # [n_i]
    # A group stays in one fold.  It is a subject (patient), or a single sample if the data set has no subjects.
    group_ids = samples if arrays.subject is None else arrays.subject[samples]  # [n_i]
    # of each group, its first sample; of each regular sample, the index of its group
    unique_ids, first, group = np.unique(group_ids[is_regular], return_index=True, return_inverse=True)
    num_groups = len(unique_ids)
    order = rng.permutation(num_groups)
    group_labels = labels[samples[is_regular][first]]  # of the first sample of each group
    order = order[np.argsort(group_labels[order], kind="stable")]  # by label, in random order within a label
    group_fold = np.empty(num_groups, np.int64)
    group_fold[order] = np.arange(num_groups) % folds  # in turn, so that each label is in all folds
    fold = np.full(len(samples), -1)
    fold[is_regular] = group_fold[group]
    return fold
