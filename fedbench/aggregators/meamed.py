"""MeaMed, mean around the median: Xie, Koyejo and Gupta, arXiv 1802.10116, 2018.

In each coordinate, it is the mean of the n - f values that are nearest to the median.
Departs from the paper: nowhere.   Reduces to: the mean with f = 0 and equal weights.
"""

import torch
from torch import Tensor

from fedbench.aggregators._columns import sorted_columns
from fedbench.aggregators.base import Aggregator, Uploads


class MeaMed(Aggregator):
    """The mean of each coordinate over the m - f values nearest to its median, if f of m rows are assumed wrong."""

    uses_weights = False

    def combine(self, u: Uploads) -> Tensor:
        """Return in each coordinate the unweighted mean of the m - f values nearest to the median, for m rows u.rows.

        # [p]

        With f = 0, return the weighted mean of the rows.
        """
        if u.f == 0:
            return u.mean
        return torch.cat([_mean_around_median(values, len(u.rows) - u.f) for values in sorted_columns(u.rows)])


def _mean_around_median(values: Tensor, count: int) -> Tensor:
    """Return the mean of the values nearest to the median.

    Of two values at the same distance, the smaller is nearer.  The nearest values are neighbours in sorted order.  They
    begin at the first position from which the value after them is farther from the median than the value at that
    position.

    Args:
        values: Sorted values of some columns.  # [b, m]
        count: Number of values in a mean.

    Returns:
        The means.  # [b]
    """
    last = values.shape[1] - 1
    median = (values[:, last // 2] + values[:, (last + 1) // 2])[:, None] / 2  # [b, 1]
    # for each window but the last one: whether moving it on by one value brings it nearer to the median
    is_nearer = values[:, count:] - median < median - values[:, : last + 1 - count]  # [b, m - count]
    first = is_nearer.cumprod(1).sum(1, keepdim=True)  # position of the nearest window's first value  [b, 1]
    window = first + torch.arange(count, device=values.device)  # [b, count]
    return values.gather(1, window).mean(1)
