"""FedPer: the base is averaged, the head stays with its client; both train together.

Arivazhagan et al., 2019, Algorithms 1 and 2.  A client never sampled deploys the new base with the initial head.
Departs from the paper: nowhere.   Reduces to: FedAvg when the head is empty.
"""

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore


class FedPer(Algorithm):
    """State: u [|base|], the averaged columns (all but the head); v [N, |head|], each client's head as last trained."""

    requires = ("head",)
    has_base = True

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.base = model.without("head")
        self.head = self.base.rest(model.size)
        w = model.init_row()
        self.u = self.base.take(w).clone()  # [|u|]
        self.v = rows("v", default=self.head.take(w))  # lazy [N, |head|]

    def round(self, cohort: Cohort) -> None:
        """Algorithms 1 and 2."""
        u = cohort.broadcast(u=self.u).u
        out = cohort.train(self.with_heads(cohort, u), how=LocalTraining(uploaded=self.base))  # [K, P]
        up = cohort.upload(u=self.base.take(out.theta), relative_to={"u": "u"})  # [K, |u|]
        self.u = cohort.mean(up.u)
        self.v[cohort.ids] = self.head.take(out.theta)

    def with_heads(self, cohort: Cohort, u: Tensor) -> Tensor:
        """Every client's head on the base u.  # [K, P]"""
        rows = u.new_empty(len(cohort), self.base.size + self.head.size)
        return self.head.put(self.base.put(rows, u), self.v[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """The new base with the client's head."""
        return self.with_heads(cohort, cohort.broadcast(u=self.u).u)
