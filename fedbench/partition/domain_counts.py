"""A table of sample counts: so many of each natural silo (modality, hospital) to each client.

Source: pFedNet's code, whose federations of BraTS17 are such tables of clients and modalities, 90 each by default; a
0 is a modality that a client lacks.
"""

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged
from fedbench.partition.base import deal


class DomainCounts:
    """counts [N, D]: how many samples of each of the data set's D natural silos each client gets, of the pool that is
    divided first; others (dataset.split=published) are divided in proportion, rounded down.  The rest stays out."""

    leaves_out = True  # what the table does not ask for

    def __init__(self, counts: list[list[int]]):
        widths = {len(row) for row in counts}
        fine = len(widths) == 1 and 0 not in widths and all(count >= 0 for row in counts for count in row)
        require(fine, "partition.counts must hold a row for each client with a count >= 0 for each natural silo")
        self.counts = np.array(counts, np.int64).T  # [D, N]

    def count(self, num_domains: int) -> int:
        """N where partition.num_clients is null."""
        return self.counts.shape[1]

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where the silos are not D, or hold too few samples."""
        if domain is None:
            raise ConfigError("partition=domain_counts needs a data set with natural silos, and this has none")
        silos, (wanted, rows) = int(domain.max()) + 1, self.counts.shape
        require(num_clients == rows, f"partition.num_clients={num_clients}, but partition.counts has {rows} rows")
        require(silos == wanted, f"partition.counts has {wanted} columns, and the data set {silos} natural silos")
        first = np.bincount(domain[pools[0]], minlength=silos)  # [D]
        short = self.counts.sum(1) > first
        if short.any():
            d = int(short.argmax())
            raise ConfigError(
                f"partition.counts asks for {self.counts[d].sum():,} samples of natural silo {d}, and there are "
                f"{first[d]:,}"
            )
        dealt = []
        for pool in pools:
            members = [rng.permutation(pool[domain[pool] == d]) for d in range(silos)]
            share = np.array([len(m) for m in members]) / np.maximum(first, 1)  # [D], 1 for the first pool
            dealt.append(deal(members, np.floor(self.counts * share[:, None] + 1e-9).astype(np.int64)))
        return dealt
