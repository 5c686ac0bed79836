"""Dirichlet label skew: the samples of each class are divided by shares from Dir(alpha).

Sources: Hsu et al. 2019 (``cap: false``).  Yurochkin et al., ICML 2019, whose script the generators of PGFed and PFLlib
repeat (``cap: true``): a client with at least n / N samples gets nothing of the following classes, and the partition is
drawn again until every client has ``min_size`` samples.  The order of random numbers is that of these scripts (class by
class: shuffle, then shares), so ``seed: 1`` gives their partitions.  The number of tries is limited here.
"""

import numpy as np

from fedbench.core.options import ConfigError, Count, Positive, require
from fedbench.core.split import Ragged
from fedbench.partition.base import assign_by_counts, group_by_class

# Limits all tries together to some seconds.  Unit: one shuffled sample; drawing one share takes about as long as 5.
MAX_WORK = 200_000_000


class Dirichlet:
    """Dirichlet label skew of concentration ``alpha``.  ``cap``: a client with n / N samples gets no further classes.

    Args:
        alpha: Concentration.  Smaller values give more skew.
        min_size: Minimum samples of each client in the first pool: all samples with dataset.split=merged, else training
            samples.
        min_test: Minimum test samples of each client, unless merged.
        cap: Whether a client with at least n / N samples gets no samples of further classes.
    """

    max_tries = 2000

    def __init__(
        self,
        alpha: Positive = 0.1,
        min_size: Count = 10,
        min_test: Count = 1,
        cap: bool = True,
    ):
        self.alpha = alpha
        self.min_size = min_size
        self.min_test = min_test
        self.cap = cap

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Divide the samples of each class by Dirichlet shares, the same in every pool (set of samples).

        The shares are drawn again until every client has at least min_size samples in the first pool (training, or all)
        and min_test in the second (test).

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        minima = np.array([self.min_size, self.min_test, 0][: len(pools)])  # [pools]; 0: validation parts may be empty
        for pool, minimum, name in zip(pools, minima, ("min_size", "min_test", "")):
            require(
                minimum * num_clients <= len(pool),
                f"partition.num_clients={num_clients:,} clients with partition.{name}={minimum} need "
                f"{minimum * num_clients:,} samples, but there are {len(pool):,}: lower one of these options",
            )
        classes = [group_by_class(labels, pool) for pool in pools]
        # the shuffled classes of the first pool, and the samples of each client by pool and class [pools, C, N]
        first_pool, counts = self._draw(classes, minima, num_clients, rng)
        other_pools = [[rng.permutation(members) for members in pool] for pool in classes[1:]]
        return [assign_by_counts(pool, c) for pool, c in zip([first_pool, *other_pools], counts)]

    def _draw(
        self,
        classes: list[list[np.ndarray]],
        minima: np.ndarray,
        num_clients: int,
        rng: np.random.RandomState,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Draw partitions by `_try` until one gives every client enough samples, or the limit of tries is reached.

        There are at most max_tries, and fewer (but at least 10) on large data, so that all tries take some seconds
        (MAX_WORK).

        Args:
            classes: classes[pool][k] are the indices of the samples of class k in a pool.
            minima: Minimum samples of each client by pool, [pools].
            num_clients: N.
            rng: Random numbers.

        Returns:
            The shuffled classes of the first pool, and the counts [pools, C, N] by pool, class and client.

        Raises:
            ConfigError: No try met the minima.
        """
        largest_minimum = 0  # over the tries, samples of the smallest client in the first pool
        # time of one try, in the time to shuffle a sample: the share of a client in a class takes as long as 5 samples
        work = sum(map(len, classes[0])) + 5 * len(classes[0]) * num_clients
        tries = min(self.max_tries, max(10, MAX_WORK // work))
        for _ in range(tries):
            shuffled, counts = self._try(classes, num_clients, rng)
            smallest = counts.sum(1).min(1)  # [pools], samples of the smallest client
            if (smallest >= minima).all():
                return shuffled, counts
            largest_minimum = max(largest_minimum, int(smallest[0]))
        raise ConfigError(
            f"no Dirichlet partition with partition.alpha={self.alpha} for {num_clients:,} clients gave each of them "
            f"partition.min_size={self.min_size} samples and partition.min_test={self.min_test} test samples in "
            f"{tries:,} tries; the smallest client had at most {largest_minimum}. Raise partition.alpha, or lower the "
            "number of clients, partition.min_size or partition.min_test"
        )

    def _try(
        self, classes: list[list[np.ndarray]], num_clients: int, rng: np.random.RandomState
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Draw one partition, which may give some clients too few samples.

        Pools are the sets of samples to divide, such as training and test samples.  A class has the same shares in all.
        The papers' script has one pool: its random numbers come first, and `assign` shuffles the other pools later.
        With the option cap, a client with at least n / N samples of the first pool gets none of the following classes.

        Args:
            classes: classes[pool][k] are the indices of the samples of class k in a pool.
            num_clients: N.
            rng: Random numbers.

        Returns:
            The shuffled classes of the first pool, and the counts [pools, C, N] by pool, class and client.  All counts
            are 0 if the shares of a class cannot be normalized.
        """
        counts = np.zeros((len(classes), len(classes[0]), num_clients), np.int64)  # [pools, C, N]
        client_sizes = np.zeros(num_clients, np.int64)
        even_size = sum(map(len, classes[0])) / num_clients  # n / N
        shuffled = []
        for k, members in enumerate(classes[0]):
            shuffled.append(members.copy())
            rng.shuffle(shuffled[-1])
            shares = rng.dirichlet(np.repeat(self.alpha, num_clients))  # [N]
            if self.cap:
                shares = np.where(client_sizes < even_size, shares, 0.0)
            total = shares.sum()
            if not 0 < total < np.inf:  # a tiny alpha underflows: counts of 0 make this try fail
                return shuffled, np.zeros_like(counts)
            shares = shares / total
            for pool, pool_classes in enumerate(classes):
                counts[pool, k] = _share_counts(shares, len(pool_classes[k]))
            client_sizes += counts[0, k]
        return shuffled, counts


def _share_counts(shares: np.ndarray, n: int) -> np.ndarray:
    """Return the number of samples of each client if n samples are divided by shares.

    The samples are cut at floor(cumsum(shares) n), and the last client gets the remaining ones.  Rounding may give the
    last client one sample although its share is 0, as in the papers' script.

    Args:
        shares: Fraction of each client, [N], with a sum of 1.
        n: The number of samples.

    Returns:
        Numbers of samples, [N] int64, with the sum n.
    """
    boundaries = (np.cumsum(shares) * n).astype(np.int64)[:-1]
    return np.diff(boundaries, prepend=0, append=n)
