"""Practical label skew: every client has some of every class, most of it in few hands.

Source: APPLE (Luo and Wu, IJCAI 2022), its authors' code: of each class one client holds 80%, one 10% and
each of the other ten 1%, who is who being permuted class by class; the same shares divide the train and the
test pool.  With ``seed: 42`` and 12 clients the draws are those of that code.
For other numbers of clients (the papers use 12 only) the 10% of the many is divided evenly among them, or
``shares`` says what each rank gets.  The few samples that rounding leaves over stay out.
"""

import numpy as np

from fedbench.core.options import require
from fedbench.core.split import Ragged
from fedbench.partition.base import deal_shares


class Practical:
    """shares: one positive number per client, summing to at most 1; None: 10% / (N - 2) each, 10%, 80%."""

    def __init__(self, shares: list[float] | None = None):
        self.shares = shares

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where shares do not fit the number of clients."""
        ranks = self._ranks(num_clients)  # [N]
        rows = []
        for _ in np.unique(labels):
            rng.shuffle(ranks)
            rows.append(ranks.copy())
        return deal_shares(labels, pools, np.array(rows), rng)

    def _ranks(self, num_clients: int) -> np.ndarray:
        if self.shares is None:
            require(
                num_clients >= 3,
                f"partition.num_clients={num_clients} is too few for the 1%/10%/80% shares: give at least 3, "
                "or partition.shares",
            )
            return np.array([0.1 / (num_clients - 2)] * (num_clients - 2) + [0.1, 0.8])
        shares = np.array(self.shares, float)
        require(
            len(shares) == num_clients,
            f"partition.shares has {len(shares)} numbers for partition.num_clients={num_clients:,}",
        )
        require(
            bool((shares > 0).all()) and shares.sum() <= 1 + 1e-9,
            f"partition.shares must be positive and sum to at most 1, got {list(self.shares)}",
        )
        return shares
