"""Coordinate-wise median: Yin, Chen, Ramchandran and Bartlett, ICML 2018.

Departs from the paper: clients have weights.  client_weights=uniform is the paper.
"""

from torch import Tensor

from fedbench.aggregators._columns import weighted_median
from fedbench.aggregators.base import Aggregator, Uploads


class Median(Aggregator):
    """The weighted median of each coordinate.  `f` is only used by pre=nnm."""

    uses_f = False

    def combine(self, u: Uploads) -> Tensor:
        """Return the weighted median of each column of u.rows.  # [p]"""
        return weighted_median(u.rows, u.weights)
