"""FedRep: as FedPer, but a client first fits its head to the received base, then the base to its head.

Collins et al., ICML 2021, Algorithm 1.  Departs from the paper: the base trains local.epochs epochs (its box: one
step or epoch; body_epochs=1), as the released code of the PFL benchmarks.  A client never sampled deploys the new
base with the initial head.   Reduces to: FedBABU's federated phase at head_epochs = 0.
"""

from fedbench.algorithms.base import Cohort, LocalTraining
from fedbench.algorithms.fedper import FedPer
from fedbench.core.options import Count, Natural


class FedRep(FedPer):
    """head_epochs: of the head, base frozen; body_epochs: of the base, head frozen (null: local.epochs).

    State: u [|base|]; v [N, |head|], each client's head as last trained.
    """

    def __init__(self, head_epochs: Natural = 1, body_epochs: Count | None = None):
        self.head_epochs, self.body_epochs = head_epochs, body_epochs

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: head, then base; the base is sent."""
        u = cohort.broadcast(u=self.u).u
        theta = self.with_heads(cohort, u)  # [K, P]
        theta = cohort.train(
            theta,
            columns=self.head,
            how=LocalTraining(epochs=self.head_epochs, key="head", buffers="head", uploaded=False),
        ).theta
        theta = cohort.train(theta, columns=self.base, how=LocalTraining(epochs=self.body_epochs)).theta
        up = cohort.upload(u=self.base.take(theta), relative_to={"u": "u"})  # [K, |u|]
        self.u = cohort.mean(up.u)
        self.v[cohort.ids] = self.head.take(theta)
