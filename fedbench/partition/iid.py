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
        """Shuffle each pool and divide it evenly (see Partition.assign)."""
        lists = []
        for pool in pools:
            sizes = np.full(num_clients, len(pool) // num_clients, np.int64)  # [N]
            sizes[: len(pool) % num_clients] += 1
            lists.append(Ragged.from_sizes(rng.permutation(pool), sizes))
        return lists
