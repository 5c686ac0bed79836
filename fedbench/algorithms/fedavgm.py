"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi and Brown, arXiv 1909.06335, 2019.  With d = w - sum p_i theta_i:  v <- beta v + d,  w <- w - server_lr v
(server/momentum.py).
Departs from the paper: nowhere.   Reduces to: FedAvg with beta = 0 and server_lr = 1.
Other methods use the same rule by server=momentum.
"""

from fedbench.algorithms.base import Cohort
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import Positive, UnitInterval
from fedbench.server.momentum import Momentum


class FedAvgM(FedAvg):
    """FedAvgM.

    Args:
        beta: Server momentum, in [0, 1).
        server_lr: Server learning rate.
        nesterov: Whether to use Nesterov momentum.

    State:
        w: Server model, [P].  v: Momentum buffer, [p] (kept with the rule).
    """

    def __init__(self, beta: UnitInterval = 0.9, server_lr: Positive = 1.0, nesterov: bool = False):
        super().__init__()
        self.rule = Momentum(beta, server_lr, nesterov)

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedAvg, in which the server moves w towards the clients' mean with momentum."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent
        self.w = cohort.mean(up.theta, updates="w", rule=self.rule)  # the new w, by self.rule
