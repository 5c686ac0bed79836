"""Pachinko allocation: label skew along a tree of classes; every client draws from classes and superclasses of its own.

Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021, appendix F (CIFAR-100), as in the code of the prompt
papers (FedOTP, pFedMoAP: noniid-labeldir100): a client draws Dir(alpha) over the superclasses and Dir(beta) over the
classes of each, then n / N samples one by one without replacement; what runs out is left out from then on, here and
for later clients.  All pools are drawn from together and told apart afterwards.
Departs from that code: its clients are shuffled at the end, by an unseeded generator.
"""

import numpy as np

from fedbench.core.options import Positive, require
from fedbench.core.split import Ragged

# CIFAR-100's superclass (0 aquatic mammals, 1 fish, ..., 19 vehicles 2) of its classes, as the data set's files tell.
CIFAR100 = [
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
]


class Pachinko:
    """alpha: concentration over superclasses.  beta: over the classes of one.

    coarse: the superclass (0, 1, ...) of each class; None: CIFAR-100's.
    """

    def __init__(self, alpha: Positive = 0.5, beta: Positive = 10.0, coarse: list[int] | None = None):
        self.alpha, self.beta, self.coarse = alpha, beta, coarse

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where the classes have no superclasses."""
        parent = self._parents(int(labels.max()) + 1)  # [C]
        everything = np.concatenate(pools)
        members = [rng.permutation(everything[labels[everything] == c]) for c in range(len(parent))]
        left = np.array([len(m) for m in members])  # [C]
        each, held = len(everything) // num_clients, []
        for _ in range(num_clients):
            drawn = self._draw(each, left, parent, rng)  # [each] classes
            took = np.bincount(drawn, minlength=len(parent))  # [C]
            held.append(np.concatenate([m[n - k : n] for m, n, k in zip(members, left, took)]))
            left -= took
        pool_of = np.empty(len(labels), np.int64)
        for i, pool in enumerate(pools):
            pool_of[pool] = i
        return [Ragged.from_lists([samples[pool_of[samples] == i] for samples in held]) for i in range(len(pools))]

    def _parents(self, num_classes: int) -> np.ndarray:
        """The superclass of each class [C]."""
        coarse = CIFAR100 if self.coarse is None else self.coarse
        said = "which knows CIFAR-100's alone while it is null" if self.coarse is None else f"which has {len(coarse)}"
        require(
            len(coarse) == num_classes,
            f"partition=pachinko needs the superclass of each of the {num_classes} classes in partition.coarse, {said}",
        )
        fits = all(type(c) is int and c >= 0 for c in coarse)
        require(fits, f"partition.coarse must hold whole numbers >= 0, got {coarse}")
        return np.array(coarse)

    def _draw(self, count: int, left: np.ndarray, parent: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """The classes of a client's samples [count], of each class at most left [C]."""
        left = left.copy()
        groups = np.unique(parent[left > 0])
        top = np.zeros(parent.max() + 1)  # [superclasses]
        top[groups] = rng.dirichlet(np.full(len(groups), self.alpha))
        leaf = np.zeros(len(parent))  # [C]
        for g in groups:
            kept = (parent == g) & (left > 0)
            leaf[kept] = rng.dirichlet(np.full(kept.sum(), self.beta))
        drawn: list[np.ndarray] = []
        while count:
            some = rng.choice(len(parent), count, p=_chances(top, leaf, left > 0, parent))
            some = some[: _until_one_runs_out(some, left)]
            left -= np.bincount(some, minlength=len(left))
            count -= len(some)
            drawn.append(some)
        return np.concatenate(drawn)


def _chances(top: np.ndarray, leaf: np.ndarray, kept: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """The chance of each class [C]: its superclass's times its own there, over what is kept [C].

    A tiny alpha may give all to what has run out; then the rest share evenly.
    """
    leaf = np.where(kept, np.maximum(np.nan_to_num(leaf), 1e-300), 0.0)
    within = np.bincount(parent, leaf, len(top))  # [superclasses]
    top = np.where(within > 0, np.maximum(np.nan_to_num(top), 1e-300), 0.0)
    chances = top[parent] / top.sum() * leaf / np.where(within > 0, within, 1.0)[parent]
    return chances / chances.sum()


def _until_one_runs_out(drawn: np.ndarray, left: np.ndarray) -> int:
    """How many of the draws (classes) there are until the last sample of some class, of left [C], is among them."""
    order = np.argsort(drawn, kind="stable")
    counts = np.bincount(drawn, minlength=len(left))
    rank = np.empty(len(drawn), np.int64)  # how many of its class came before each draw
    rank[order] = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.flatnonzero(rank + 1 == left[drawn])
    return int(last[0]) + 1 if len(last) else len(drawn)
