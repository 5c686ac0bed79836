"""Ditto: a global model by FedAvg, and beside it a personal model held near it.

Li et al., ICML 2021, Algorithm 1: v_i <- argmin f_i(v) + (lam/2) ||v - w||^2, anchored at the w that was received.
Departs from the paper: aggregation weighted by samples.   Reduces to: Local at lam = 0 (the personal rows draw the
same batches as the global ones, on purpose); the path of w does not depend on lam.
"""

from torch import Tensor

from fedbench.algorithms.base import Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import Count, NonNegative
from fedbench.engine.per_client import per_client


class Ditto(FedAvg):
    """lam: pull of the global model, or a list, one for each client; personal_epochs: epochs for v (null:
    local.epochs).

    State: w [P]; v [N, P].
    """

    def __init__(self, lam: NonNegative | list[NonNegative] = 1.0, personal_epochs: Count | None = None):
        super().__init__()
        self.lam, self.personal_epochs = per_client(lam), personal_epochs

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """v_i starts from w."""
        super().setup(federation, model, rows)
        self.v = rows("v", default=self.w)

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: v_i near the w that came, then w as in FedAvg."""
        w = cohort.broadcast(w=self.w).w  # [P]
        pull = (lambda s: s.value(self.lam) * (s.theta - w)) if self.lam else None  # [k, P]
        v = cohort.train(
            self.v[cohort.ids],
            extra_grad=pull,
            how=LocalTraining(epochs=self.personal_epochs, buffers="v", counted=0, uploaded=False),
        ).theta  # the same samples again: counted=0
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})
        self.w = cohort.mean(up.theta)
        self.v[cohort.ids] = v  # [K, P]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """v_i as last trained."""
        return self.v[cohort.ids]
