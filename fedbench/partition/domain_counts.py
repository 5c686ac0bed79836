"""A table of sample counts: how many samples of each client site (modality, hospital) each client gets.

Source: pFedNet's code, whose federations of BraTS17 are such tables of clients and modalities, 90 each by default.
A count of 0 is a modality that a client does not have.
"""

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged
from fedbench.partition.base import assign_by_counts, floor_counts


class DomainCounts:
    """Assign samples by a table of counts.  Samples beyond the counts are not assigned.

    Args:
        counts: Samples of each of the D client sites for each client in the first pool, [N, D].  Other pools
            (dataset.split=published) are divided in proportion, rounded down.
    """

    leaves_samples_out = True

    def __init__(self, counts: list[list[int]]):
        widths = {len(row) for row in counts}
        is_table = len(widths) == 1 and 0 not in widths and all(count >= 0 for row in counts for count in row)
        require(
            is_table,
            f"partition.counts={counts} must have a row for each client with a count >= 0 for each client site: "
            "make all rows equally long, as in [[30,0],[10,20]]",
        )
        self.counts = np.array(counts, np.int64).T  # [D, N]

    def default_num_clients(self, num_domains: int) -> int:
        """Return the number of clients if partition.num_clients is null: the rows of the option ``counts``.

        `num_domains` is not used.
        """
        return self.counts.shape[1]

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign samples by the table, in every pool, a set of samples.

        Args:
            labels: Label of each sample of the data set, [n].
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: N.
            rng: The only source of random numbers.
            domain: The client site of each sample of the data set, [n] int64, or None.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        if domain is None:
            raise ConfigError(
                "partition=domain_counts needs a data set with client sites, but this one has none: use another "
                "partition, such as partition=iid"
            )
        num_sites = int(domain.max()) + 1
        columns, rows = self.counts.shape
        require(
            num_clients == rows,
            f"partition.num_clients={num_clients}, but partition.counts has {rows} rows: give one row per client, or "
            "set partition.num_clients=null",
        )
        require(
            num_sites == columns,
            f"partition.counts has {columns} columns, but the data set has {num_sites} client sites: give one "
            "column for each site",
        )
        first_sizes = np.bincount(domain[pools[0]], minlength=num_sites)  # [D]
        for site, total in enumerate(self.counts.sum(1)):
            require(
                total <= first_sizes[site],
                f"partition.counts asks for {total:,} samples of client site {site}, but there are "
                f"{first_sizes[site]:,}: lower the counts",
            )
        assigned = []
        for pool in pools:
            by_site = [rng.permutation(pool[domain[pool] == site]) for site in range(num_sites)]
            sizes = np.array([len(samples) for samples in by_site])  # [D]
            fraction = sizes / np.maximum(first_sizes, 1)  # [D], 1 for the first pool
            assigned.append(assign_by_counts(by_site, floor_counts(self.counts * fraction[:, None])))
        return assigned
