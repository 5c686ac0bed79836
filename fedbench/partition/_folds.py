"""Cross-validation within the training parts: one of k folds of each client's is its validation part.

Test parts stay as they are, so that a value may be chosen by k runs, one a fold, before anybody is tested.

Letters: N clients, k folds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.options import require
from fedbench.data.base import EXTRA, Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split


def hold_out(split: Split, arrays: Arrays, folds: int, fold: int, seed: int) -> Split:
    """The split with fold `fold` of each client's training samples as its validation part.

    Folds are stratified by label and differ by one sample at most in each class; a subject stays whole, and then they
    are stratified by the label of the subject's first sample.  Extra samples are always trained on.  A client with
    fewer samples (or subjects) than folds has no validation part in some of them.  ConfigError where there are
    validation parts already, there is no such fold, or somebody would be left with nothing to train on.
    """
    require(fold < folds, f"fold={fold} is none of the {folds} folds, 0 to {folds - 1}")
    require(
        len(split.val.indices) == 0,
        f"folds={folds} makes validation parts of the training parts: set dataset.val_fraction=0, and use a "
        "dataset.split that has none",
    )
    labels, rng = arrays.labels(), np.random.RandomState(seed)
    train, val = [], []
    for i in range(split.num_clients):
        own = split.train[i]
        held = _folds_of(own, arrays, labels, folds, rng) == fold  # [n_i]
        require(
            not held.all(),
            f"folds={folds}: client {i} has {len(own)} training sample(s), and fold {fold} would hold out all of them",
        )
        train.append(own[~held])
        val.append(own[held])
    ragged = type(split.train)
    return replace(split, train=ragged.from_lists(train), val=ragged.from_lists(val))


def _folds_of(
    own: np.ndarray, arrays: Arrays, labels: np.ndarray, folds: int, rng: np.random.RandomState
) -> np.ndarray:
    """The fold of each of a client's samples own [n_i], -1 for extra ones.  # [n_i]"""
    proper = arrays.split[own] != EXTRA  # [n_i]
    units = own if arrays.subject is None else arrays.subject[own]
    names, first, unit = np.unique(units[proper], return_index=True, return_inverse=True)
    order = rng.permutation(len(names))
    order = order[np.argsort(labels[own[proper][first]][order], kind="stable")]  # by label, in random order within it
    number = np.empty(len(names), np.int64)
    number[order] = np.arange(len(names)) % folds
    found = np.full(len(own), -1)
    found[proper] = number[unit.reshape(-1)]
    return found
