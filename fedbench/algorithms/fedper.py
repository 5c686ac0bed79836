"""FedPer: the base is averaged, the head stays with its client; both train together.

Arivazhagan et al., 2019, Algorithms 1 and 2.  A client never sampled deploys the new base with the initial head.
Departs from the paper: nowhere.   Reduces to: FedAvg when the head is empty, Local when the base is empty.
"""

from fedbench.algorithms.base import Algorithm


class FedPer(Algorithm):
    """State: u [|base|], the averaged columns (all but the head); theta [N, P], each client's row as last trained."""

    requires = ("head",)

    def setup(self, federation, model, rows):
        self.base = model.without("head")
        w = model.init_row()
        self.u = self.base.take(w).clone()                                            # [|u|]
        self.theta = rows("theta", default=w)                                         # lazy [N, P]

    def round(self, cohort):
        u = cohort.broadcast(u=self.u).u
        out = cohort.train(self.base.put(self.theta[cohort.ids], u), uploaded=self.base)             # [K, P]
        up = cohort.upload(u=self.base.take(out.theta))                               # [K, |u|]
        self.u = cohort.weights @ up.u
        self.theta[cohort.ids] = out.theta

    def personalized(self, cohort, final):
        return self.base.put(self.theta[cohort.ids], self.u)
