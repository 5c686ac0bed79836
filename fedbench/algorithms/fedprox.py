"""FedProx: local training is held near the server's model by (mu/2) ||theta - w||^2.

Li et al., MLSys 2020, Algorithm 2 (equal local epochs instead of gamma-inexact solutions).
Departs from the paper: aggregation weighted by samples, as FedAvg.   Reduces to: FedAvg at mu = 0, bit for bit.
"""

from fedbench.algorithms.fedavg import FedAvg
from fedbench.options import NonNegative


class FedProx(FedAvg):
    """mu: weight of the proximal term.  State: w [P]."""

    def __init__(self, mu: NonNegative = 0.01):
        super().__init__()
        self.mu = mu

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w                                              # [P]
        prox = (lambda s: self.mu * (s.theta - w)) if self.mu else None               # [k, P]
        up = cohort.upload(theta=cohort.train(w, extra_grad=prox).theta)
        self.w = cohort.weights @ up.theta
