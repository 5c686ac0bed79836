"""IID: a random permutation dealt out evenly (sizes differ by at most one)."""

import numpy as np

from fedbench.core.split import Ragged


class IID:
    """Every client draws from the same distribution."""

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; each pool is shuffled and cut into num_clients runs."""
        return [self._deal(pool, num_clients, rng) for pool in pools]

    @staticmethod
    def _deal(pool: np.ndarray, num_clients: int, rng: np.random.RandomState) -> Ragged:
        each, more = divmod(len(pool), num_clients)
        sizes = np.full(num_clients, each, np.int64)  # [N]
        sizes[:more] += 1
        return Ragged.from_sizes(rng.permutation(pool), sizes)
