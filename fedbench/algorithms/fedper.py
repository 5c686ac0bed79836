"""FedPer: the base is averaged, the head stays with its client; both train together.

Arivazhagan et al., 2019, Algorithms 1 and 2.  A client never sampled deploys the new base with the initial head.
Departs from the paper: nowhere.   Reduces to: FedAvg when the head is empty, Local when the base is empty.
"""

from fedbench.algorithms.base import Algorithm


class FedPer(Algorithm):
    """State: u [|base|], the averaged columns (all but the head); v [N, |head|], each client's head as last trained."""

    requires = ("head",)

    def setup(self, federation, model, rows):
        self.base = model.without("head")
        self.own = self.base.rest(model.size)
        w = model.init_row()
        self.u = self.base.take(w).clone()                                            # [|u|]
        self.v = rows("v", default=self.own.take(w))                                  # lazy [N, |head|]

    def round(self, cohort):
        u = cohort.broadcast(u=self.u).u
        out = cohort.train(self.joined(cohort, u), uploaded=self.base)                # [K, P]
        up = cohort.upload(u=self.base.take(out.theta))                               # [K, |u|]
        self.u = cohort.weights @ up.u
        self.v[cohort.ids] = self.own.take(out.theta)

    def joined(self, cohort, u):
        """The clients' own heads on the base u.  # [K, P]"""
        rows = u.new_empty(len(cohort), self.base.size + self.own.size)
        return self.own.put(self.base.put(rows, u), self.v[cohort.ids])

    def personalized(self, cohort, final):
        return self.joined(cohort, self.u)
