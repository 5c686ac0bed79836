"""FedAdagrad: Adagrad at the server.

Reddi et al., ICLR 2021, Algorithm 2 (_fedopt.py, server/adagrad.py).  With Delta = mean of theta_i - w:

    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2
    w <- w + server_lr m / (sqrt(v) + tau)

Departs from the paper: nowhere.  Released codes start with v = 0 (initial_v) and weight clients by samples
(weights).
"""

from fedbench.algorithms._fedopt import FedOpt, Weights
from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server.adagrad import Adagrad


class FedAdagrad(FedOpt):
    """FedAdagrad.

    Args:
        server_lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
        weights: How the server averages: "uniform", as in the paper, or "samples".

    State:
        w: Server model, [P].  The rule keeps m and v, [p].
    """

    def __init__(
        self,
        server_lr: Positive = 0.1,
        beta1: UnitInterval = 0.0,
        tau: Positive = 1e-3,
        initial_v: NonNegative | None = None,
        weights: Weights = "uniform",
    ):
        super().__init__(Adagrad(server_lr, beta1, tau, initial_v), weights)
