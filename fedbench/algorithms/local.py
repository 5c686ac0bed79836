"""Local: every client trains its own model, without communication.

APPLE's tables call it Separate.  A client trains only in the rounds in which it is sampled, so its computation equals
that of a federated method.
Departs from the papers: nowhere (sampling as in the PGFed code; APPLE's protocol samples all clients).
Reduces to: FedAvg-local with aggregation replaced by the identity.
"""

from collections.abc import Sequence

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore


class Local(Algorithm):
    """Local training without communication.

    State:
        theta: Client models, [N, P].
    """

    supports_client_ranks = True

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the clients' models theta_i [N, P], stored by `rows`, to the initial model."""
        self.theta = rows("theta", default=model.init_row())

    def round(self, cohort: Cohort) -> None:
        """Continue the local training of the sampled clients; nothing is sent."""
        # uploaded=False: the trained parameters stay with the clients
        self.theta[cohort.ids] = cohort.train(self.theta[cohort.ids], how=LocalTraining(uploaded=False)).theta  # [K, P]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, theta_i as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def initial_row_for_new_clients(self, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the model of all new clients: the untrained initial model, as there is no common trained one.  # [P]

        `cohorts`, the training clients, is not used.
        """
        return self.theta.default
