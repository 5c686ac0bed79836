"""Geometric median (RFA): Pillutla, Kakade and Harchaoui, IEEE Transactions on Signal Processing 2022, Algorithm 2.

Smoothed Weiszfeld iterations, with the clients' weights a_i:

    b_i = a_i / max(nu, |x_i - z|),   z <- sum_i b_i x_i / sum_i b_i

Departs from the paper: z starts at the model that the server sent.  The paper leaves the start open.
"""

import torch
from torch import Tensor

from fedbench.aggregators._mixing import distances
from fedbench.aggregators.base import Aggregator, PreAggregation, Uploads
from fedbench.core.options import Count, NonNegative, Positive


class GeometricMedian(Aggregator):
    """The point with the smallest weighted sum of distances to the uploads.

    Args:
        f: Assumed number of wrong uploads, or a fraction below 0.5; only used by pre=nnm.
        pre: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.
        iterations: Number of Weiszfeld iterations.
        nu: Smoothing, the smallest distance in a weight, > 0.
    """

    uses_f = False

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        iterations: Count = 3,
        nu: Positive = 1e-6,
    ):
        super().__init__(f, pre, bucket_size)
        self.iterations, self.nu = iterations, nu

    def combine(self, u: Uploads) -> Tensor:
        """Return the geometric median of u.rows, as approximated by `iterations` Weiszfeld iterations from u.start.

        # [p]
        """
        z = u.start  # the value that the server sent, or without one the median of the rows  [p]
        for _ in range(self.iterations):
            distance = distances(u.rows, z)  # [m]
            if not bool(torch.isfinite(distance).all()):  # in float32, squares of values above 1.8e19 are infinite
                distance = (u.rows.double() - z.double()).norm(dim=1)
            b = u.weights / distance.clamp_min(self.nu)  # weights of the next mean; nu: smallest divisor  [m]
            z = (b / b.sum()).to(u.rows) @ u.rows
        return z
