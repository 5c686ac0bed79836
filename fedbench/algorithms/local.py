"""Local: every client trains alone, and only in the rounds in which it is sampled, so that it spends what FL spends.

Called Separate in APPLE's tables.  Departs from the papers: nowhere (participation by sampling as in the PGFed code;
APPLE's protocol samples everyone).   Reduces to: FedAvg-local with aggregation replaced by the identity.
"""

from fedbench.algorithms.base import Algorithm


class Local(Algorithm):
    """State: theta [N, P]."""

    def setup(self, federation, model, rows):
        self.theta = rows("theta", default=model.init_row())

    def round(self, cohort):
        self.theta[cohort.ids] = cohort.train(self.theta[cohort.ids], uploaded=False).theta       # [K, P]

    def personalized(self, cohort, final):
        return self.theta[cohort.ids]

    def newcomer_row(self, cohorts):
        return self.theta.default                                                     # nobody to copy: [P]
