"""Norm bounding: Sun, Kairouz, Suresh and McMahan, arXiv 1911.07963, 2019.

    w <- w + sum_i p_i (x_i - w) min(1, bound / |x_i - w|)

Departs from the paper: its bound is a number, and its noise is the option `privacy`.  The default, bound=None, is the
weighted median of the norms |x_i - w|, as in FLAME (Nguyen et al., USENIX Security 2022).
Reduces to: the mean, bit for bit, if the bound is larger than all changes.
"""

from fedbench.aggregators.base import PreAggregation
from fedbench.aggregators.centered_clipping import CenteredClipping
from fedbench.core.options import Count, NonNegative, Positive


class NormBound(CenteredClipping):
    """The mean of changes from the server's model, each clipped to a norm: one iteration of centered clipping.

    Args:
        f: Assumed number of wrong uploads, or a fraction below 0.5; only used by pre=nnm.
        pre: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.
        bound: Largest l2 norm of a change, > 0.  None: the weighted median of the norms of this round's changes.
    """

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        bound: Positive | None = None,
    ):
        super().__init__(f, pre, bucket_size, tau=bound, iterations=1)
