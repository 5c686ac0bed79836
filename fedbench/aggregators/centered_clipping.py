"""Centered clipping: Karimireddy, He and Jaggi, ICML 2021.

    v <- v + sum_i p_i (x_i - v) min(1, tau / |x_i - v|)

Departs from the paper: uploads are models, so v starts at the model that the server sent; p_i are the clients' weights,
and client_weights=uniform is the paper.  The paper's tau is a number.  The default, tau=None, is the weighted median of
the distances |x_i - v| in each iteration, as FLAME clips to the median norm (Nguyen et al., USENIX Security 2022).
Reduces to: the mean, bit for bit, if tau is larger than all distances.
"""

from torch import Tensor

from fedbench.aggregators._columns import weighted_median
from fedbench.aggregators._mixing import distances
from fedbench.aggregators.base import Aggregator, PreAggregation, Uploads
from fedbench.core.options import Count, NonNegative, Positive

TINY = 1e-30  # instead of a distance of 0


class CenteredClipping(Aggregator):
    """The mean of changes that are clipped around the last estimate.

    Args:
        f: Assumed number of wrong uploads, or a fraction below 0.5; only used by pre=nnm.
        pre: "none", "nnm" or "bucketing".
        bucket_size: Number of uploads in a bucket.
        tau: Largest l2 norm of a change, > 0.  None: the weighted median of the norms in each iteration.
        iterations: Number of iterations.
    """

    uses_f = False

    def __init__(
        self,
        f: NonNegative = 0.1,
        pre: PreAggregation = "none",
        bucket_size: Count = 2,
        tau: Positive | None = None,
        iterations: Count = 3,
    ):
        super().__init__(f, pre, bucket_size)
        self.tau, self.iterations, self.scale_free = tau, iterations, tau is None

    def combine(self, u: Uploads) -> Tensor:
        """Return v [p], which starts at `u.start`.

        Each of `iterations` steps adds the weighted mean of the rows' differences to v, clipped to norm tau.  tau=None
        is the weighted median of their norms.
        """
        v = u.start  # the server's value, or without one the median of the rows  [p]
        for _ in range(self.iterations):
            distance = distances(u.rows, v)  # [m]
            tau = self.tau  # a number, or [1]
            # None: the weighted median of the distances, in float64, because those of very large rows are infinite
            if tau is None:
                tau = weighted_median(distance[:, None].double(), u.weights).to(distance)
            if bool((distance <= tau).all()):
                v = u.mean  # no row is clipped
                continue
            # min(1, tau / |x_i - v|); TINY: no division by 0  [m]
            scale = (tau / distance.clamp_min(TINY)).clamp_max(1)
            factors = u.weights * scale  # [m]
            v = (1 - factors.sum()) * v + factors @ u.rows
        return v
