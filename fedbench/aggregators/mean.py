"""The mean of the uploads, as in FedAvg.  A single wrong upload can move it anywhere."""

from torch import Tensor

from fedbench.aggregators.base import Aggregator, Uploads


class Mean(Aggregator):
    """The weighted mean of the uploads."""

    def __init__(self):
        super().__init__(f=0)

    def combine(self, u: Uploads) -> Tensor:
        """Return the mean of u.rows, weighted by u.weights.  # [p]"""
        return u.mean
