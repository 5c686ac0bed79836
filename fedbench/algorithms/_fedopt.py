"""FedOpt, the common part of FedAdagrad, FedAdam and FedYogi.

Reddi et al., ICLR 2021, Algorithm 2.  Clients train as in FedAvg.  With Delta = mean of theta_i - w, the server has

    m <- beta1 m + (1 - beta1) Delta
    v <- second moment of Delta
    w <- w + server_lr m / (sqrt(v) + tau)

by a rule of fedbench/server.  Other methods use the same rules by server=adam and so on.
"""

from typing import Literal

from fedbench.algorithms.base import Cohort
from fedbench.algorithms.fedavg import FedAvg
from fedbench.server.base import ServerRule

Weights = Literal["uniform", "samples"]


class FedOpt(FedAvg):
    """Base class of FedAdagrad, FedAdam and FedYogi.  w: server model; rule: the server's optimizer, which keeps m, v.

    Args:
        rule: The server's optimizer.
        weights: How the server averages: "uniform", as in the paper, or "samples".

    State:
        w: Server model, [P].  The rule keeps m and v, [p].
    """

    def __init__(self, rule: ServerRule, weights: Weights):
        super().__init__()
        self.rule = rule
        self.weights: Weights = weights

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedOpt (Algorithm 2): clients train from w, and the server's optimizer moves w.

        Its pseudo-gradient is w minus the mean of the clients' trained models.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent
        self.w = cohort.mean(up.theta, self.weights, updates="w", rule=self.rule)  # the new w, by self.rule
