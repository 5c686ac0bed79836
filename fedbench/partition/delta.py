"""Label imbalance delta: some clients have delta negatives per positive, others delta positives per negative.

Class 0 is negative, and all other classes are positive.

Source: pFedNet, which defines delta = n_neg / n_pos but not the clients.  The ratio tables of its code imply these:
clients 0 and 1 have delta : 1, client 2 has equal numbers, clients 3 and 4 have 1 : delta.  Generalized to N clients,
floor(2 N / 5) at each end are skewed (with 2 clients, one each).

First, a balanced pool of n samples of each kind is drawn, as the sample counts behind the paper's tables imply.  Every
client has s = floor(2 n / N) samples.  A skewed client has floor(s delta / (1 + delta)) samples of one kind and
floor(s / (1 + delta)) of the other, a balanced client floor(s / 2) of each.  Remaining samples are not assigned.
With dataset.split=published or stratified, the test pool is divided by the same rule.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Positive, require
from fedbench.core.split import Ragged
from fedbench.partition.base import assign_by_counts, floor_counts, group_by_class


class Delta:
    """Label imbalance: by the ratio ``delta``, or by the table ``counts`` of negatives and positives per client.

    Args:
        delta: Negatives per positive of the first clients.
        counts: Number of negatives and positives of each client in the first balanced pool, [N, 2], used instead of
            delta.  Other pools are divided in proportion.
    """

    leaves_samples_out = True  # by balancing and rounding

    def __init__(self, delta: Positive = 2.0, counts: list[list[int]] | None = None):
        self.delta = delta
        self.counts = counts
        are_pairs = counts is None or (len(counts) > 0 and all(len(row) == 2 and min(row) >= 0 for row in counts))
        require(
            are_pairs,
            f"partition.counts={counts} must have a pair of numbers >= 0, [negatives, positives], for each client: "
            "list such pairs, as in [[30,10],[20,20]]",
        )

    def default_num_clients(self, num_domains: int) -> int:
        """Return the number of clients if partition.num_clients is null: the rows of ``counts``, or 5 if it is None.

        `num_domains` is not used.
        """
        return 5 if self.counts is None else len(self.counts)

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign each client its counts of negatives (class 0) and positives (other classes), in every pool.

        Of a pool, a set of samples, as many negatives as positives are used.  The other samples have no client.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        require(
            num_clients >= 2, f"partition.num_clients={num_clients} must be at least 2 for partition=delta: raise it"
        )
        rows = num_clients if self.counts is None else len(self.counts)
        require(
            rows == num_clients,
            f"partition.num_clients={num_clients}, but partition.counts has {rows} rows: give one row per client, or "
            "set partition.num_clients=null",
        )
        positive = (labels > 0).astype(np.int64)  # [n]: 0 negative, 1 positive
        require(
            bool(0 < positive.sum() < len(labels)),
            "partition=delta needs negatives (class 0) and positives (other classes), but the data set has only one of "
            "them: use another partition, such as partition=dirichlet",
        )
        assigned, first_sizes = [], None
        for pool in pools:
            classes = [rng.permutation(members) for members in group_by_class(positive, pool)]
            size = min(len(members) for members in classes)  # the balanced pool has as many negatives as positives
            classes = [members[:size] for members in classes]
            sizes = np.full(2, size)  # negatives and positives of this pool
            # those of the first pool, to which the option counts refers; other pools get counts in proportion
            first_sizes = sizes if first_sizes is None else first_sizes
            assigned.append(assign_by_counts(classes, self._client_counts(sizes, first_sizes, num_clients)))
        return assigned

    def _client_counts(self, sizes: np.ndarray, first_sizes: np.ndarray, num_clients: int) -> np.ndarray:
        """Return how many negatives (class 0) and positives (other classes) of a pool each client gets.

        ``self.counts`` has a pair [negatives, positives] for each client.  Without it, the first clients get delta
        negatives per positive, the last clients delta positives per negative, and clients between them equal numbers.

        Args:
            sizes: Negatives and positives of this balanced pool, [2].
            first_sizes: Those of the first pool, [2], to which ``self.counts`` refers.  Other pools get as many samples
                in proportion, rounded down.
            num_clients: N.

        Returns:
            Counts, [2, N] int64.
        """
        if self.counts is not None:
            counts = np.array(self.counts, np.int64).T  # [2, N]
            for total, available, kind in zip(counts.sum(1), first_sizes, ("negatives", "positives")):
                require(
                    total <= available,
                    f"partition.counts asks for {total:,} {kind}, but only {available:,} remain after balancing the "
                    "classes: lower the counts",
                )
            return floor_counts(counts * (sizes / first_sizes)[:, None])
        # number of first clients with more negatives, and of last clients with fewer; 2 of 5 at each end as in pFedNet
        skewed = max(1, 2 * num_clients // 5)
        client_size = int(sizes.sum()) // num_clients
        major = client_size * self.delta / (1 + self.delta)  # samples of a skewed client's frequent kind
        minor = client_size / (1 + self.delta)  # and of its rare kind
        counts = np.full((2, num_clients), client_size / 2)
        counts[:, :skewed] = [[major], [minor]]
        counts[:, num_clients - skewed :] = [[minor], [major]]
        return floor_counts(counts)


# Samples of the more and the less frequent kind of a skewed client, by delta.  The balanced client has 200 and 200.
LUNA16 = {1: (200, 200), 2: (260, 130), 4: (316, 79), 7: (350, 50)}


class DeltaLuna16(Delta):
    """The counts that pFedNet's Luna16 tables imply for five clients.

    Args:
        delta: Negatives per positive of the first clients: 1, 2, 4 or 7, the values of the tables.
    """

    def __init__(self, delta: Literal[1, 2, 4, 7] = 2):
        if delta not in LUNA16:
            raise ConfigError(
                f"partition.delta={delta} must be one of {', '.join(map(str, LUNA16))}, for which pFedNet's tables "
                "imply counts; use partition=delta for others"
            )
        more, fewer = LUNA16[delta]
        super().__init__(delta, [[more, fewer], [more, fewer], [200, 200], [fewer, more], [fewer, more]])
