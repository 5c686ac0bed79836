"""FedAvg: local SGD from the server's model, then the mean weighted by samples.

McMahan et al., AISTATS 2017, Algorithm 1.  With deploy="local" it is FedAvg-local: the same training, but client i
deploys its model as it was after its own last local training, before aggregation (PGFed with mu = 0).
Departs from the paper: weights are normalized over the cohort, as all released codes do.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore


class FedAvg(Algorithm):
    """State: w [P]; theta [N, P], what client i last trained (deploy="local" only)."""

    def __init__(self, deploy: Literal["global", "local"] = "global"):
        self.deploy = deploy

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w) if self.deploy == "local" else None

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]
        self.w = cohort.mean(up.theta)
        if self.theta is not None:
            self.theta[cohort.ids] = out.theta

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w, or with deploy="local" what the client last trained."""
        return cohort.broadcast(w=self.w).w if self.theta is None else self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """w."""
        return self.w
