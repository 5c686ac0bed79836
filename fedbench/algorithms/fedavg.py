"""FedAvg: local SGD from the server's model, then averaging weighted by sample counts.

McMahan et al., AISTATS 2017, Algorithm 1.
With deploy="local" it is FedAvg-local: training is the same, but client i deploys its model as it was after its last
local training, before aggregation (PGFed with mu = 0).
Departs from the paper: weights are normalized over the cohort, as in all released codes.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore


class FedAvg(Algorithm):
    """FedAvg.  w: server model; theta: the clients' own models, stored only with deploy="local".

    Args:
        deploy: "global" deploys the server model; "local" deploys each client's model as last trained (FedAvg-local).

    State:
        w: Server model, [P].
        theta: Client models as last trained, [N, P] (deploy="local" only).
    """

    supports_client_ranks = True
    averages_one_model = True

    def __init__(self, deploy: Literal["global", "local"] = "global"):
        self.deploy = deploy

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] to the initial model; with deploy="local" also the clients' models theta_i [N, P].

        `rows` stores theta_i.  With another value of deploy, theta is None.
        """
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w) if self.deploy == "local" else None

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedAvg (Algorithm 1): clients train from the server model w, and the server averages."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = cohort.train(w)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it
        if self.theta is not None:  # deploy="local": clients deploy their own trained models
            self.theta[cohort.ids] = out.theta

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return what the cohort deploys: w [P], or with deploy="local" each client's last trained model [K, P].

        `final`, whether the last round is over, changes nothing.
        """
        return cohort.broadcast(w=self.w).w if self.theta is None else self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
