"""The problem of the official trajectories, drawn again: handwritten digits, six clients, a network 64-32-10.

Nothing but the seeds below decides who has which sample, where the weights begin and in which order a client sees its
samples, so that other programs can take the same steps.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays

TRAIN, TEST = (43, 77, 60, 25, 91, 38), (20, 31, 24, 17, 40, 22)  # samples of each client
EVERYBODY = tuple(range(len(TRAIN)))
COHORTS = {"full": (EVERYBODY,) * 4, "part": ((0, 2, 4), (1, 2, 5), (0, 1, 3), (2, 4, 5), (0, 2, 4))}
SPLIT_SEED, WEIGHT_SEED, ORDER_SEED = 7, 100, 11


def digits(images: bool = False) -> Arrays:
    """Pixels from 0 to 1 in a row [64], or (images) every pixel as 3 x 3 of them within a border of 2 [1, 28, 28]."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    if images:
        x = x.reshape(-1, 1, 8, 8).repeat(3, axis=2).repeat(3, axis=3)
        x = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
    return Arrays(x, y.astype(np.int64), np.zeros(len(y), np.int8), 10)


def clients(labels: np.ndarray) -> Split:
    """Each client asks for labels by its own Dirichlet(0.6) draw, again where a label has run out."""
    rng = np.random.default_rng(SPLIT_SEED)
    left = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(10)]
    train, test = [], []
    for sizes in zip(TRAIN, TEST):
        shares = rng.dirichlet([0.6] * 10)
        for part, size in zip((train, test), sizes):
            part.append(own := [])
            while len(own) < size:
                if left[label := int(rng.choice(10, p=shares))]:
                    own.append(left[label].pop())
    nothing = [np.empty(0, np.int64)] * len(train)
    return Split(*(Ragged.from_lists([np.array(own) for own in part]) for part in (train, nothing, test)))


def first_row() -> np.ndarray:
    """The network's weights and biases, layer by layer, end to end.  # [2,410] float32"""
    rng = np.random.default_rng(WEIGHT_SEED)
    parts = []
    for inputs, outputs in ((64, 32), (32, 10)):
        parts += [rng.standard_normal((outputs, inputs)) / np.sqrt(inputs), rng.standard_normal(outputs) * 0.1]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def order(client: int, round: int, epoch: int, size: int) -> np.ndarray:
    """In which order a client takes its samples in one pass over them, rounds and passes counted from 0.  # [size]"""
    return np.random.default_rng([ORDER_SEED, client, round, epoch]).permutation(size)
