"""FedRep: clients train the personal head with the base frozen, then the shared base with the head frozen.

Collins et al., ICML 2021, Algorithm 1.  A client never sampled deploys the new base with the initial head.
Departs from the paper: the base trains for local.epochs epochs, as in the released code of the PFL benchmarks.  The
paper trains it for one step or epoch (body_epochs=1).
Reduces to: FedBABU before its fine-tuning, at head_epochs = 0.
"""

from fedbench.algorithms.base import Cohort, LocalTraining
from fedbench.algorithms.fedper import FedPer
from fedbench.core.options import Count, NonNegativeInt


class FedRep(FedPer):
    """FedRep.  u: shared base; h_i: personal head of client i.

    Args:
        head_epochs: Epochs of head training, with the base frozen.
        body_epochs: Epochs of base training, with the head frozen; None uses local.epochs.

    State:
        u: Averaged base, [|base|].
        v: Personal heads as last trained, [N, |head|].
    """

    def __init__(self, head_epochs: NonNegativeInt = 1, body_epochs: Count | None = None):
        self.head_epochs, self.body_epochs = head_epochs, body_epochs

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedRep: clients train the head, then the base; the server averages the bases."""
        u = cohort.broadcast(u=self.u).u  # as the clients receive it  [|u|]
        theta = self.with_heads(cohort, u)  # rows with base u and head h_i  [K, P]
        theta = cohort.train(
            theta,
            columns=self.head,
            # key, buffers: the head has its own batches and optimizer state; uploaded: it stays with the client
            how=LocalTraining(epochs=self.head_epochs, key="head", buffers="head", uploaded=False),
        ).theta
        theta = cohort.train(theta, columns=self.base, how=LocalTraining(epochs=self.body_epochs)).theta
        up = cohort.upload(u=self.base.take(theta), relative_to={"u": "u"})  # [K, |u|]; the change of u is sent
        self.u = cohort.mean(up.u, updates="u")  # the new u: the mean, or the step of the option server towards it
        self.v[cohort.ids] = self.head.take(theta)  # v_i is FedPer's name of the personal head h_i
