"""Multi-Krum: Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017.

It returns the mean of the m uploads with the lowest scores of Krum.
Reduces to: Krum with m = 1; the mean, with equal weights, if m is the number of uploads.
"""

from torch import Tensor

from fedbench.aggregators.base import PreAggregation, Uploads
from fedbench.aggregators.krum import Krum, Neighbors
from fedbench.core.options import Count, NonNegative


class MultiKrum(Krum):
    """The mean of the uploads with the smallest scores of Krum.  u.rows: uploads; u.f are assumed to be wrong.

    Args:
        f: Assumed number of wrong uploads, or a fraction below 0.5; see `Aggregator`.
        pre: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.
        neighbors: Number of other uploads in a score: "n-f-2", as in the paper, or "n-f-1".
        m: Number of uploads in the mean.  None: n - f.
    """

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        neighbors: Neighbors = "n-f-2",
        m: Count | None = None,
    ):
        super().__init__(f, pre, bucket_size, neighbors)
        self.m = m

    def combine(self, u: Uploads) -> Tensor:
        """Return the unweighted mean of the rows with the lowest scores: the option m of them, at most n.  # [p]

        With m=None, they are n - f.
        """
        n = len(u.rows)
        m = min(self.m or n - u.f, n)
        selected = self.scores(u).argsort(stable=True)[:m]  # [m]
        return u.weights.new_zeros(n).index_fill(0, selected, 1 / m) @ u.rows
