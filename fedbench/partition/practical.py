"""Practical label skew: every client has samples of every class, but most of a class belongs to a few clients.

Source: the code of APPLE (Luo and Wu, IJCAI 2022).  Of each class, one client has 80%, one 10% and each of the other
ten 1%.  Clients are permuted for each class, and the same shares divide training and test pool.  With ``seed: 42`` and
12 clients the random numbers are those of that code.  For other numbers of clients, which the papers do not have, the
last 10% are divided evenly, or ``shares`` gives the shares.  The few samples that rounding leaves are not assigned.
"""

import numpy as np

from fedbench.core.options import require
from fedbench.core.split import Ragged
from fedbench.partition.base import assign_by_shares


class Practical:
    """The same shares of each class, permuted over the clients.

    Args:
        shares: One positive number per client, with a sum of at most 1.  None: 10% / (N - 2) each, 10% and 80%.
    """

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
        """Divide each class by the same shares, in another random order of the clients for each class.

        The order is the same in every pool (set of samples).

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        shares = self._client_shares(num_clients)  # [N]
        rows = []
        for _ in np.unique(labels):
            rng.shuffle(shares)  # in place: another client gets the largest share
            rows.append(shares.copy())
        return assign_by_shares(labels, pools, np.array(rows), rng)

    def _client_shares(self, num_clients: int) -> np.ndarray:
        """Return the shares of a class before they are permuted over the clients: the option shares, or by the papers.

        Args:
            num_clients: N.

        Returns:
            N fractions of the samples of a class.  Those of the papers: 0.8, 0.1, and 0.1 divided by all others.

        Raises:
            ConfigError: N is too small for the papers' shares, or the option does not fit.
        """
        if self.shares is None:
            require(
                num_clients >= 3,
                f"partition.num_clients={num_clients} is too small for shares of 80%, 10% and 10% for all others: "
                "use at least 3, or set partition.shares",
            )
            return np.array([0.1 / (num_clients - 2)] * (num_clients - 2) + [0.1, 0.8])  # 10% for all others together
        shares = np.array(self.shares, float)
        require(
            len(shares) == num_clients,
            f"partition.shares has {len(shares)} values for partition.num_clients={num_clients:,}: give one per client",
        )
        require(
            bool((shares > 0).all()) and shares.sum() <= 1 + 1e-9,  # 1e-9: rounding of the sum
            f"partition.shares={list(self.shares)} must be numbers > 0 with a sum of at most 1: lower them, or set it "
            "to null for 80%, 10% and 10% for all others",
        )
        return shares
