"""LG-FedAvg: the mirror of FedPer: each client has its own base, and the head is averaged.

Liang et al., 2020, Algorithm 1.  Departs from the paper: update="alternate" (default) moves, per batch, the base and
then the head at the new base, as the released code of the PFL benchmarks; "joint" is the paper's one step on both.
frozen_momentum_drift reproduces that code: the fixed part has a gradient of zero instead of none, so that its momentum
still moves it (with torch 1.4; weight decay acts as well).
Reduces to: Local when the head is empty.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, RowStore, Step


class LGFedAvg(Algorithm):
    """State: h [|head|]; theta [N, P], each client's row as last trained."""

    requires = ("head",)
    has_base = True

    def __init__(self, update: Literal["alternate", "joint"] = "alternate", frozen_momentum_drift: bool = False):
        self.update, self.drift = update, frozen_momentum_drift

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.head = model.columns["head"]
        self.base = model.without("head") & model.trained
        w = model.init_row()
        self.h = self.head.take(w).clone()  # [|h|]
        self.theta = rows("theta", default=w)  # lazy [N, P]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: base and head train, the head is sent."""
        h = cohort.broadcast(h=self.h).h
        start = self.head.put(self.theta[cohort.ids], h)  # [K, P]
        out = cohort.train(
            start, step=self.alternate if self.update == "alternate" else None, how=LocalTraining(uploaded=self.head)
        )
        up = cohort.upload(h=self.head.take(out.theta), relative_to={"h": "h"})  # [K, |h|]
        self.h = cohort.mean(up.h)
        self.theta[cohort.ids] = out.theta

    def alternate(self, s: Step, batch: Batch) -> None:
        """The base, then the head at the new base."""
        for part in (self.base, self.head):
            s.descend(s.grad(batch, columns=part), columns=None if self.drift else part)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """The client's base with the new head."""
        return self.head.put(self.theta[cohort.ids], cohort.broadcast(h=self.h).h)
