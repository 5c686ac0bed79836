"""FedYogi: Yogi at the server.

Reddi et al., ICLR 2021, Algorithm 2 (_fedopt.py, server/yogi.py).  With Delta = mean of theta_i - w:

    m <- beta1 m + (1 - beta1) Delta
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)
    w <- w + server_lr m / (sqrt(v) + tau)

Departs from the paper: nowhere.  Released codes start with v = 0 (initial_v) and weight clients by samples
(weights).
"""

from fedbench.algorithms._fedopt import FedOpt, Weights
from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server.yogi import Yogi


class FedYogi(FedOpt):
    """FedYogi.

    Args:
        server_lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
        weights: How the server averages: "uniform", as in the paper, or "samples".

    State:
        w: Server model, [P].  The rule keeps m and v, [p].
    """

    def __init__(
        self,
        server_lr: Positive = 0.1,
        beta1: UnitInterval = 0.9,
        beta2: UnitInterval = 0.99,
        tau: Positive = 1e-3,
        initial_v: NonNegative | None = None,
        weights: Weights = "uniform",
    ):
        super().__init__(Yogi(server_lr, beta1, beta2, tau, initial_v), weights)
