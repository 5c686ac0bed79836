"""Pachinko allocation: label skew along a tree of superclasses and classes.

Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021, appendix F (CIFAR-100), as in the code of the prompt
papers (FedOTP, pFedMoAP: noniid-labeldir100).  A client draws Dir(alpha) over superclasses and Dir(beta) over the
classes of each, and then n / N samples without replacement.  A class without remaining samples is excluded from then
on, also for later clients.  Samples of all pools are drawn together.  Departs from that code: it shuffles the clients
at the end, by an unseeded generator.
"""

import numpy as np

from fedbench.core.options import Positive, require
from fedbench.core.split import Ragged

# Superclass (0 aquatic mammals, 1 fish, ..., 19 vehicles 2) of each class of CIFAR-100, from the files of the data set.
CIFAR100 = [
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
]


class Pachinko:
    """Label skew along a tree: each client draws Dir(alpha) over superclasses, and Dir(beta) over the classes in each.

    Args:
        alpha: Concentration over superclasses.
        beta: Concentration over the classes of a superclass.
        coarse: The superclass (0, 1, ...) of each class.  None: those of CIFAR-100.
    """

    def __init__(self, alpha: Positive = 0.5, beta: Positive = 10.0, coarse: list[int] | None = None):
        self.alpha = alpha
        self.beta = beta
        self.coarse = coarse

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Draw the samples of one client after the other from all pools together, then separate them by pool.

        Each client gets n / N samples, rounded down.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        superclass = self._superclasses(int(labels.max()) + 1)  # [C]
        all_samples = np.concatenate(pools)
        members = [rng.permutation(all_samples[labels[all_samples] == c]) for c in range(len(superclass))]  # by class
        remaining = np.array([len(m) for m in members])  # [C], samples left; those of a class are its first ones
        client_size = len(all_samples) // num_clients
        client_samples = []
        for _ in range(num_clients):
            classes = self._draw_classes(client_size, remaining, superclass, rng)  # [client_size]
            counts = np.bincount(classes, minlength=len(superclass))  # [C]
            # k samples from the end of the n that are left of each class
            client_samples.append(np.concatenate([m[n - k : n] for m, n, k in zip(members, remaining, counts)]))
            remaining -= counts
        # All pools were divided together: separate each client's samples by pool.
        pool_of_sample = np.empty(len(labels), np.int64)
        for i, pool in enumerate(pools):
            pool_of_sample[pool] = i
        return [
            Ragged.from_lists([samples[pool_of_sample[samples] == i] for samples in client_samples])
            for i in range(len(pools))
        ]

    def _superclasses(self, num_classes: int) -> np.ndarray:
        """Return the superclass of each class: the option coarse, or CIFAR-100's if it is None.  # [num_classes] int64

        Raise ConfigError if there are more or fewer, or if they are no whole numbers >= 0.
        """
        coarse = CIFAR100 if self.coarse is None else self.coarse
        if self.coarse is None:
            require(
                num_classes == len(CIFAR100),
                f"partition.coarse=null stands for the superclasses of CIFAR-100, but the data set has {num_classes} "
                "classes instead of 100: set partition.coarse to a list with the superclass of each class, as whole "
                "numbers from 0",
            )
        require(
            len(coarse) == num_classes,
            f"partition.coarse must list the superclass of each of the {num_classes} classes, but it has "
            f"{len(coarse)} values: correct the list",
        )
        are_indices = all(type(c) is int and c >= 0 for c in coarse)
        require(
            are_indices,
            f"partition.coarse={coarse} must be a list of whole numbers >= 0: "
            "give the superclass of each class, as in [0,0,1]",
        )
        return np.array(coarse)

    def _draw_classes(
        self, count: int, remaining: np.ndarray, superclass: np.ndarray, rng: np.random.RandomState
    ) -> np.ndarray:
        """Draw the classes of a client's samples.

        The client draws its probabilities: Dir(alpha) of the superclasses, and Dir(beta) of the classes in each, among
        those with samples left.  Samples are drawn in batches.  A batch ends when a class has no samples left, which
        changes the probabilities.

        Args:
            count: Number of samples of the client.
            remaining: Samples of each class that no earlier client got, [C].  Not changed.
            superclass: Superclass of each class, [C].
            rng: Random numbers.

        Returns:
            The class of each sample, [count].  No class occurs more often than ``remaining`` allows.
        """
        remaining = remaining.copy()
        available = np.unique(superclass[remaining > 0])  # superclasses with samples left
        p_superclass = np.zeros(superclass.max() + 1)  # [superclasses], probabilities
        p_superclass[available] = rng.dirichlet(np.full(len(available), self.alpha))
        p_class = np.zeros(len(superclass))  # [C], within the superclass
        for g in available:
            members = (superclass == g) & (remaining > 0)  # [C] bool
            p_class[members] = rng.dirichlet(np.full(members.sum(), self.beta))
        classes_of_batches: list[np.ndarray] = []
        while count:
            p = _probabilities(p_superclass, p_class, remaining > 0, superclass)
            classes = rng.choice(len(superclass), count, p=p)
            classes = classes[: _count_until_exhausted(classes, remaining)]
            remaining -= np.bincount(classes, minlength=len(remaining))
            count -= len(classes)
            classes_of_batches.append(classes)
        return np.concatenate(classes_of_batches)


def _probabilities(
    p_superclass: np.ndarray, p_class: np.ndarray, available: np.ndarray, superclass: np.ndarray
) -> np.ndarray:
    """Return the probability of each class: that of its superclass times that within its superclass.

    Args:
        p_superclass: Probability of each superclass, [superclasses].
        p_class: Probability of each class within its superclass, [C].
        available: Whether a class has samples left, [C] bool.  The other classes have probability 0.
        superclass: Superclass of each class, [C].

    Returns:
        Probabilities, [C].  If a tiny alpha leaves all probability to classes without samples, the others are equally
        likely.
    """
    # 1e-300 replaces probabilities that a tiny alpha or beta rounds to 0 or NaN, so that the sums below are not 0.
    p_class = np.where(available, np.maximum(np.nan_to_num(p_class), 1e-300), 0.0)
    total = np.bincount(superclass, p_class, len(p_superclass))  # [superclasses]
    p_superclass = np.where(total > 0, np.maximum(np.nan_to_num(p_superclass), 1e-300), 0.0)
    p = p_superclass[superclass] / p_superclass.sum() * p_class / np.where(total > 0, total, 1.0)[superclass]
    return p / p.sum()


def _count_until_exhausted(classes: np.ndarray, remaining: np.ndarray) -> int:
    """Return how many draws are valid: up to the first one that takes the last sample of its class.

    Args:
        classes: Class of each draw, [count].
        remaining: Samples left of each class before these draws, [C].

    Returns:
        A number from 1 to count; count if no class is exhausted.
    """
    order = np.argsort(classes, kind="stable")  # draws of a class become neighbours and keep their order
    counts = np.bincount(classes, minlength=len(remaining))
    earlier = np.empty(len(classes), np.int64)  # earlier draws of the same class
    earlier[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    exhausting = np.flatnonzero(earlier + 1 == remaining[classes])
    return int(exhausting[0]) + 1 if len(exhausting) else len(classes)
