"""Label imbalance delta of two kinds: some clients hold delta negatives to a positive, some the reverse.

Class 0 is negative, every other class positive.

Source: pFedNet, which gives delta = n_neg / n_pos and not who is skewed; the ratio tables of its code settle the
pattern: clients 0 and 1 hold delta : 1, client 2 as many of each, clients 3 and 4 hold 1 : delta.  Generalized to N
clients: floor(2 N / 5) are skewed each way and those between are balanced; with 2 clients, one each way.

A balanced pool, n of either kind, is drawn first (the larger kind loses samples at random, as the sample counts
behind the paper's tables show).  Every client's size is s = floor(2 n / N); a skewed client has floor(s delta / (1 +
delta)) of one kind and floor(s / (1 + delta)) of the other, a balanced one floor(s / 2) of each.  Leftovers stay out.
With dataset.split=published or stratified the test pool is divided by the same rule.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Positive, require
from fedbench.core.split import Ragged
from fedbench.partition.base import by_class, deal


class Delta:
    """delta: negatives (class 0) to a positive on the first clients.

    counts: instead of delta, how many negatives and positives [N, 2] each client gets of the balanced pool that is
    drawn first; other pools are divided in proportion.
    """

    leaves_out = True  # what balancing and rounding leave

    def __init__(self, delta: Positive = 2.0, counts: list[list[int]] | None = None):
        self.delta, self.counts = delta, counts
        fine = counts is None or (len(counts) > 0 and all(len(row) == 2 and min(row) >= 0 for row in counts))
        require(fine, "partition.counts must hold a pair of numbers >= 0, [neg, pos], for each client")

    def count(self, num_domains: int) -> int:
        """N where partition.num_clients is null: the rows of counts, or 5."""
        return 5 if self.counts is None else len(self.counts)

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign; ConfigError where a kind or a client is missing, or counts ask for too many."""
        require(num_clients >= 2, f"partition.num_clients={num_clients}: delta skews two clients at least")
        rows = num_clients if self.counts is None else len(self.counts)
        require(rows == num_clients, f"partition.num_clients={num_clients}, but partition.counts has {rows} rows")
        positive = (labels > 0).astype(np.int64)  # [n]
        both = 0 < positive.sum() < len(labels)
        require(bool(both), "partition=delta needs negatives (class 0) and positives, and the data set lacks one kind")
        dealt, first = [], None
        for pool in pools:
            classes = [rng.permutation(members) for members in by_class(positive, pool)]
            least = min(len(members) for members in classes)
            classes = [members[:least] for members in classes]
            sizes = np.array([len(members) for members in classes])  # [2]
            first = sizes if first is None else first
            dealt.append(deal(classes, self._counts(sizes, first, num_clients)))
        return dealt

    def _counts(self, sizes: np.ndarray, first: np.ndarray, num_clients: int) -> np.ndarray:
        """How many each client gets of a pool with sizes [2]; first [2]: the sizes of the first pool.  # [2, N]"""
        if self.counts is not None:
            counts = np.array(self.counts, np.int64).T  # [2, N]
            short = counts.sum(1) > first
            if short.any():
                c = int(short.argmax())
                kind = ("negatives", "positives")[c]
                raise ConfigError(
                    f"partition.counts asks for {counts[c].sum():,} {kind}, and there are {first[c]:,} in the balanced "
                    "pool"
                )
            return _floor(counts * (sizes / first)[:, None])
        skewed = max(1, 2 * num_clients // 5)
        size = int(sizes.sum()) // num_clients
        major, minor = size * self.delta / (1 + self.delta), size / (1 + self.delta)
        counts = np.full((2, num_clients), size / 2)
        counts[:, :skewed] = [[major], [minor]]
        counts[:, num_clients - skewed :] = [[minor], [major]]
        return _floor(counts)  # no more than sizes: of a balanced pool, as the pattern is its own mirror image


LUNA16 = {1: (200, 200), 2: (260, 130), 4: (316, 79), 7: (350, 50)}  # of a skewed client; the balanced one: 200, 200


class DeltaLuna16(Delta):
    """delta: 1, 2, 4 or 7, by the counts that pFedNet's Luna16 tables imply for five clients."""

    def __init__(self, delta: Literal[1, 2, 4, 7] = 2):
        require(
            delta in LUNA16,
            f"partition.delta={delta} must be one of {', '.join(map(str, LUNA16))}, for which pFedNet's tables imply "
            "counts; partition=delta has others",
        )
        many, few = LUNA16.get(delta, (0, 0))
        by_delta = [[many, few], [many, few], [200, 200], [few, many], [few, many]]
        super().__init__(delta, by_delta)


def _floor(counts: np.ndarray) -> np.ndarray:
    """Rounded down; 1e-9: 0.29 of 100 is 28.999999, which is 29 all the same."""
    return np.floor(counts + 1e-9).astype(np.int64)
