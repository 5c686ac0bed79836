"""IID: all samples are shuffled and divided evenly."""

import numpy as np

from fedbench.core.split import Ragged


class IID:
    """All clients have the same distribution.  Their sizes differ by at most one sample."""

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Shuffle each pool (set of samples), and divide it evenly among the clients.

        Args:
            labels: Not used: samples are divided without regard to labels.
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        lists = []
        for pool in pools:
            sizes = np.full(num_clients, len(pool) // num_clients, np.int64)  # [N]
            sizes[: len(pool) % num_clients] += 1  # the first clients get the remaining samples
            lists.append(Ragged.from_sizes(rng.permutation(pool), sizes))
        return lists
