"""Coordinate-wise trimmed mean: Yin, Chen, Ramchandran and Bartlett, ICML 2018.

In each coordinate, the f smallest and the f largest values are left out.
Departs from the paper: the remaining values have the clients' weights.  client_weights=uniform is the paper.
Reduces to: the mean with f = 0.
"""

import torch
from torch import Tensor

from fedbench.aggregators._columns import are_equal, sorted_columns, sorted_with_weights
from fedbench.aggregators.base import Aggregator, Uploads


class TrimmedMean(Aggregator):
    """The mean of each coordinate without its f smallest and f largest values, if f rows are assumed wrong."""

    def combine(self, u: Uploads) -> Tensor:
        """Return each coordinate's weighted mean over the rows, without the f smallest and f largest values.  # [p]

        The weights of the remaining values are divided by their sum.
        """
        if u.f == 0:
            return u.mean
        inner = slice(u.f, len(u.rows) - u.f)  # of each coordinate's m sorted values, without f at both ends
        if are_equal(u.weights):
            return torch.cat([values[:, inner].mean(1) for values in sorted_columns(u.rows)])
        # values and their weights w [b, m], sorted, for b coordinates at a time
        blocks = ((values[:, inner], w[:, inner]) for values, w in sorted_with_weights(u.rows, u.weights))
        return torch.cat([(values * w).sum(1) / w.sum(1) for values, w in blocks])
