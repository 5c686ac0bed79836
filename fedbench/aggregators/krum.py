"""Krum: Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017.

The score of an upload is the sum of squared distances to its nearest other uploads, n - f - 2 of them.  Krum returns
the upload with the lowest score.
Departs from the paper: nowhere.  neighbors="n-f-1" is the definition of Allouah et al., AISTATS 2023, and of ByzFL.
"""

from typing import Literal

from torch import Tensor

from fedbench.aggregators._mixing import squared_distances
from fedbench.aggregators.base import Aggregator, PreAggregation, Uploads
from fedbench.core.options import Count, NonNegative

Neighbors = Literal["n-f-2", "n-f-1"]


class Krum(Aggregator):
    """The upload with the smallest distances to its nearest others.  u.rows: m uploads; u.f are assumed to be wrong.

    Args:
        f: Assumed number of wrong uploads, or a fraction below 0.5; see `Aggregator`.
        pre: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.
        neighbors: Number of other uploads in a score: "n-f-2", as in the paper, or "n-f-1".
    """

    uses_weights = False

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        neighbors: Neighbors = "n-f-2",
    ):
        super().__init__(f, pre, bucket_size)
        self.left_out = int(neighbors[-1])

    def max_f(self, m: int) -> int:
        """Return the largest f that Krum allows for m rows, so that m > 2 f + 2; at least 0.

        With neighbors="n-f-1" it is the largest with m > 2 f.
        """
        return max((m - 1) // 2 if self.left_out == 1 else (m - 3) // 2, 0)

    def scores(self, u: Uploads) -> Tensor:
        """Return the sum of squared distances of each of the m rows to its m - f - 2 nearest other rows.  # [m]

        With neighbors="n-f-1" they are m - f - 1 rows.  It is at least one row.
        """
        m = len(u.rows)
        # self.left_out is 2, or 1 with neighbors="n-f-1"
        others = squared_distances(u.rows).sort(1).values[:, 1:]  # without the row itself  [m, m - 1]
        return others[:, : max(m - u.f - self.left_out, 1)].sum(1)

    def combine(self, u: Uploads) -> Tensor:
        """Return the row of u.rows that is nearest to its neighbours, that of the lowest score (`scores`).  # [p]

        If several have it, return the first one.
        """
        return u.rows[self.scores(u).argmin()].clone()
