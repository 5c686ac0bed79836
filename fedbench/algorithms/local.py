"""Local: every client trains alone, and only in the rounds in which it is sampled, so that it spends what FL spends.

Called Separate in APPLE's tables.  Departs from the papers: nowhere (participation by sampling as in the PGFed code;
APPLE's protocol samples everyone).   Reduces to: FedAvg-local with aggregation replaced by the identity.
"""

from collections.abc import Sequence

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore


class Local(Algorithm):
    """State: theta [N, P]."""

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.theta = rows("theta", default=model.init_row())

    def round(self, cohort: Cohort) -> None:
        """Training from where the client stopped."""
        self.theta[cohort.ids] = cohort.train(self.theta[cohort.ids], how=LocalTraining(uploaded=False)).theta  # [K, P]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """theta_i as last trained."""
        return self.theta[cohort.ids]

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        """The initial model [P]: there is nobody to copy."""
        return self.theta.default  # nobody to copy: [P]
