"""LG-FedAvg: the base is personal and the head is averaged, the reverse of FedPer.

Liang et al., 2020, Algorithm 1.
Departs from the paper: update="alternate" (default) takes one step on the base and then one on the head at the new base
for every batch, as in the released code of the PFL benchmarks.  update="joint" is the paper's single step on both.
frozen_momentum_drift=true reproduces that code under torch 1.4.  The frozen half then has a gradient of zero instead of
none, so its momentum and weight decay still move it.
Reduces to: Local when the head is empty.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, RowStore, Step


class LGFedAvg(Algorithm):
    """LG-FedAvg.  h: shared head; theta_i: model of client i, whose base is personal.

    Args:
        update: Local step: "alternate", base then head, or "joint", both at once.
        frozen_momentum_drift: Whether momentum and weight decay also move the half that the step does not train.

    State:
        h: Averaged head, [|head|].
        theta: Client models as last trained, [N, P].
    """

    requires = ("head",)
    has_base = True

    def __init__(self, update: Literal["alternate", "joint"] = "alternate", frozen_momentum_drift: bool = False):
        self.update, self.drift = update, frozen_momentum_drift

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's head h [|head|] and the clients' models theta_i [N, P] to the initial model's.

        `rows` stores theta_i.
        """
        self.head = model.columns["head"]  # columns of the head in a row
        self.base = model.without("head") & model.trained  # trained columns outside the head
        w = model.init_row()
        self.h = self.head.take(w).clone()  # [|h|]
        self.theta = rows("theta", default=w)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of LG-FedAvg: clients train base and head, and the server averages the heads."""
        h = cohort.broadcast(h=self.h).h
        start = self.head.put(self.theta[cohort.ids], h)  # [K, P]
        out = cohort.train(
            start,
            step=self.alternate if self.update == "alternate" else None,  # base and head in turn, or (None) together
            # uploaded: the columns that leave the client, whose gradients privacy clips
            how=LocalTraining(uploaded=self.head),
        )
        up = cohort.upload(h=self.head.take(out.theta), relative_to={"h": "h"})  # [K, |h|]; the change of h is sent
        self.h = cohort.mean(up.h, updates="h")  # the new h: the mean, or the step of the option server towards it
        self.theta[cohort.ids] = out.theta

    def alternate(self, s: Step, batch: Batch) -> None:
        """Take one local step on the base, then one on the head with the new base, both on the same batch."""
        for columns in (self.base, self.head):
            # columns=None: momentum and weight decay also move the other half, whose gradient is 0
            s.descend(s.grad(batch, columns=columns), columns=None if self.drift else columns)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: each client's base with the averaged head h.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.head.put(self.theta[cohort.ids], cohort.broadcast(h=self.h).h)
