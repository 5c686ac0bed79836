"""FedProx: FedAvg with the proximal term (mu/2) ||theta - w||^2 in the local objective.

Li et al., MLSys 2020, Algorithm 2 (equal local epochs instead of gamma-inexact solutions).
Departs from the paper: aggregation is weighted by samples, as in FedAvg.
Reduces to: FedAvg at mu = 0, bit for bit.
official_noop=true reproduces pFedMoAP's released code.  Its term is computed from detached tensors and has no gradient,
so training equals FedAvg.
"""

from fedbench.algorithms.base import Cohort
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import per_client


class FedProx(FedAvg):
    """FedProx.  w: server model; mu: weight of the proximal term.

    Args:
        mu: Weight of the proximal term, >= 0.  A list sets one value per client.
        official_noop: Leave out the gradient of the term, as pFedMoAP's released code does.

    State:
        w: Server model, [P].
    """

    supports_client_ranks = True
    averages_one_model = True

    def __init__(self, mu: NonNegative | list[NonNegative] = 0.01, official_noop: bool = False):
        super().__init__()
        self.mu, self.official_noop = per_client(mu), official_noop

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedProx: clients train from w with a pull mu (theta - w) towards it; the server averages."""
        w = cohort.broadcast(w=self.w).w  # [P]
        has_gradient = self.mu and not self.official_noop  # official_noop: no gradient, as in a released code
        # gradient of mu/2 |theta - w|^2; s.value: one number, or [k, 1] if mu is a list  [k, P]
        prox = (lambda s: s.value(self.mu) * (s.theta - w)) if has_gradient else None
        theta = cohort.train(w, extra_grad=prox).theta  # [K, P]
        up = cohort.upload(theta=theta, relative_to={"theta": "w"})  # theta - w is sent, and the server adds w
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it
