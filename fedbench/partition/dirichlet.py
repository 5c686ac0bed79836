"""Dirichlet label skew: each class is spread over the clients by a draw from Dir(alpha).

Source: Hsu et al. 2019 (the plain version, ``cap: false``); Yurochkin et al., ICML 2019, whose script the
PGFed and PFLlib generators repeat (``cap: true``): a client that already holds its even share n / N gets
nothing of the next classes, and the whole partition is redrawn until every client holds ``min_size``.
Draw order as in those scripts (RandomState, class by class: shuffle, then shares), so ``seed: 1`` gives
their partitions; the retries are bounded here, where theirs loop for ever.
"""

import numpy as np

from fedbench.core.options import ConfigError, Count, Positive, require
from fedbench.core.split import Ragged
from fedbench.partition.base import by_class, deal

# Samples shuffled, and five times the shares drawn, before giving up, whatever max_tries says: some seconds.
MAX_WORK = 200_000_000


class Dirichlet:
    """Label skew, strong for small alpha, none as alpha grows.

    alpha: concentration (> 0).  min_size: least samples of a client in the first pool (all samples when
    the set is merged, else train samples); min_test: the same for the later pools.  cap: the papers' size
    cap.
    """

    max_tries = 2000  # redraws before giving up

    def __init__(
        self,
        alpha: Positive = 0.1,
        min_size: Count = 10,
        min_test: Count = 1,
        cap: bool = True,
    ):
        self.alpha, self.min_size, self.min_test, self.cap = alpha, min_size, min_test, cap

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError when min_size cannot be, or was not, reached."""
        minima = np.array([self.min_size, self.min_test, 0][: len(pools)])  # [pools]
        for pool, least, name in zip(pools, minima, ("min_size", "min_test", "")):
            require(
                least * num_clients <= len(pool),
                f"partition.num_clients={num_clients:,} clients of partition.{name}={least} need "
                f"{least * num_clients:,} samples, but there are {len(pool):,}",
            )
        classes = [by_class(labels, pool) for pool in pools]
        first, cuts = self._draw(classes, minima, num_clients, rng)
        later = [[rng.permutation(k) for k in pool] for pool in classes[1:]]
        return [deal(pool, c) for pool, c in zip([first, *later], cuts)]

    def _draw(
        self,
        classes: list[list[np.ndarray]],
        minima: np.ndarray,
        num_clients: int,
        rng: np.random.RandomState,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Redraw until all are served: the shuffled classes of the first pool, counts [pools, C, N]."""
        best, work = 0, sum(map(len, classes[0])) + 5 * len(classes[0]) * num_clients
        tries = min(self.max_tries, max(10, MAX_WORK // work))
        for _ in range(tries):
            shuffled, counts = self._try(classes, num_clients, rng)
            held = counts.sum(1).min(1)  # [pools]
            if (held >= minima).all():
                return shuffled, counts
            best = max(best, int(held[0]))
        raise ConfigError(
            f"no Dirichlet partition with partition.alpha={self.alpha}, num_clients={num_clients:,} "
            f"gave every client min_size={self.min_size} samples (min_test={self.min_test}) in "
            f"{tries:,} tries; the smallest client had {best} at best: raise alpha, or lower "
            "num_clients or min_size"
        )

    def _try(
        self, classes: list[list[np.ndarray]], num_clients: int, rng: np.random.RandomState
    ) -> tuple[list[np.ndarray], np.ndarray]:
        counts = np.zeros((len(classes), len(classes[0]), num_clients), np.int64)
        held, even = np.zeros(num_clients, np.int64), sum(map(len, classes[0])) / num_clients
        shuffled = []
        for k, members in enumerate(classes[0]):
            shuffled.append(members.copy())
            rng.shuffle(shuffled[-1])
            shares = rng.dirichlet(np.repeat(self.alpha, num_clients))  # [N]
            if self.cap:
                shares = np.where(held < even, shares, 0.0)
            total = shares.sum()
            # A tiny alpha underflows (not a number, or nothing for those below the cap): a void try.
            if not 0 < total < np.inf:
                return shuffled, np.zeros_like(counts)
            shares = shares / total
            for pool, of_class in enumerate(classes):
                counts[pool, k] = _counts(shares, len(of_class[k]))
            held += counts[0, k]
        return shuffled, counts


def _counts(shares: np.ndarray, n: int) -> np.ndarray:
    """How many of n samples each client gets [N]: cut at floor(cumsum(shares) n), the last takes the rest.

    So the last client may get one sample by rounding though its share is 0, as in the papers' script.
    """
    cuts = (np.cumsum(shares) * n).astype(np.int64)[:-1]
    return np.diff(np.concatenate(([0], cuts, [n])))
