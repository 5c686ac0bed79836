"""FedSAM: clients minimize the loss at the worst point near their model (sharpness-aware minimization).

Qu et al., ICML 2022; Caldarola et al., ECCV 2022.  A local step on a batch:

    g = grad f(theta)
    e = rho g / |g|
    theta <- theta - eta grad f(theta + e)

|g| is the norm over all trained parameters.  Momentum sees the second gradient only.  The server averages as FedAvg.
The first pass alone updates running statistics of batch norm, and train/loss is the loss at theta.
Departs from the paper: nowhere.
Reduces to: FedAvg with rho = 0.
"""

from fedbench.algorithms.base import Batch, Cohort, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import PerClient, per_client


class FedSAM(FedAvg):
    """FedSAM.  w: server model; rho: radius of the neighborhood in which the worst point is sought.

    Args:
        rho: Radius of the neighborhood, >= 0, or a list with one per client.

    State:
        w: Server model, [P].
    """

    def __init__(self, rho: NonNegative | list[NonNegative] = 0.05):
        super().__init__()
        self.rho: float | PerClient = per_client(rho)

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedSAM: clients train by sharpness-aware steps, and the server averages as FedAvg."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = cohort.train(w, step=self.step if self.rho else None)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def step(self, s: Step, batch: Batch) -> None:
        """Take one local step along the gradient at s.theta + e, where e is the gradient scaled to norm rho."""
        g = s.grad(batch)  # [k, P]
        # of norm rho, which may differ between clients; 1e-12: no division by 0  [k, P]
        e = s.value(self.rho) * g / (g.norm(dim=1, keepdim=True) + 1e-12)
        s.descend(s.grad(batch, rows=s.theta + e))
