"""FedProx: local training is held near the server's model by (mu/2) ||theta - w||^2.

Li et al., MLSys 2020, Algorithm 2 (equal local epochs instead of gamma-inexact solutions).
Departs from the paper: aggregation weighted by samples, as FedAvg.   Reduces to: FedAvg at mu = 0, bit for bit.
official_noop: the term as in pFedMoAP's released code, which builds it of detached tensors: it has
no gradient, so that this is FedAvg.
"""

from fedbench.algorithms.base import Cohort
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import per_client


class FedProx(FedAvg):
    """mu: weight of the proximal term, or a list, one for each client; official_noop: above.  State: w [P]."""

    def __init__(self, mu: NonNegative | list[NonNegative] = 0.01, official_noop: bool = False):
        super().__init__()
        self.mu, self.official_noop = per_client(mu), official_noop

    def round(self, cohort: Cohort) -> None:
        """Algorithm 2."""
        w = cohort.broadcast(w=self.w).w  # [P]
        has_gradient = self.mu and not self.official_noop
        prox = (lambda s: s.value(self.mu) * (s.theta - w)) if has_gradient else None  # [k, P]
        up = cohort.upload(theta=cohort.train(w, extra_grad=prox).theta, relative_to={"theta": "w"})
        self.w = cohort.mean(up.theta)
