"""Norm bounding: Sun, Kairouz, Suresh and McMahan, arXiv 1911.07963, 2019.

    w <- w + sum_i p_i (x_i - w) min(1, bound / |x_i - w|)

Departs from the paper: nowhere; the paper's noise is the option `privacy`.
Reduces to: the mean if the bound is larger than all changes.
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
        bound: Largest l2 norm of a change, > 0.
    """

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        bound: Positive = 1.0,
    ):
        super().__init__(f, pre, bucket_size, tau=bound, iterations=1)
