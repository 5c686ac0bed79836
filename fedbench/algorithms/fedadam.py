"""FedAdam: Adam without bias correction at the server.

Reddi et al., ICLR 2021, Algorithm 2 (_fedopt.py, server/adam.py).  With Delta = mean of theta_i - w:

    m <- beta1 m + (1 - beta1) Delta
    v <- beta2 v + (1 - beta2) Delta^2
    w <- w + server_lr m / (sqrt(v) + tau)

Departs from the paper: nowhere.  Released codes start with v = 0 (initial_v) and weight clients by samples
(weights).  Flower corrects the bias by a factor of its own (bias_correction).
"""

from fedbench.algorithms._fedopt import FedOpt, Weights
from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server._adaptive import BiasCorrection
from fedbench.server.adam import Adam


class FedAdam(FedOpt):
    """FedAdam.

    Args:
        server_lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
        bias_correction: "none", as in the paper, or "flower".
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
        bias_correction: BiasCorrection = "none",
        weights: Weights = "uniform",
    ):
        super().__init__(Adam(server_lr, beta1, beta2, tau, initial_v, bias_correction), weights)
