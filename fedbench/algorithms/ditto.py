"""Ditto: a global model trained by FedAvg, and personal models regularized towards it.

Li et al., ICML 2021, Algorithm 1: v_i <- argmin f_i(v) + (lam/2) ||v - w||^2, where w is the received global model.
Departs from the paper: aggregation is weighted by samples.
Reduces to: Local at lam = 0.  To this end, v_i and w train on the same batches.  lam does not affect w.
"""

from torch import Tensor

from fedbench.algorithms.base import Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import Count, NonNegative
from fedbench.engine.per_client import per_client


class Ditto(FedAvg):
    """Ditto.  w: server model; v_i: personal model of client i.

    Args:
        lam: Weight of the regularization of v_i towards w, >= 0.  A list sets one value per client.
        personal_epochs: Epochs of personal training; None uses local.epochs.

    State:
        w: Global model, [P].
        v: Personal models, [N, P].
    """

    supports_client_ranks = True
    averages_one_model = True

    def __init__(self, lam: NonNegative | list[NonNegative] = 1.0, personal_epochs: Count | None = None):
        super().__init__()
        self.lam, self.personal_epochs = per_client(lam), personal_epochs

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the personal models v_i [N, P], stored by `rows`, to the initial model."""
        super().setup(federation, model, rows)  # sets self.w
        self.v = rows("v", default=self.w)

    def round(self, cohort: Cohort) -> None:
        """Run one round of Ditto (Algorithm 1): train v_i towards the received w, then run FedAvg for w.

        w is the global model, and v_i the client's personal model, which is not uploaded.
        """
        w = cohort.broadcast(w=self.w).w  # [P]
        # gradient of lam/2 |v_i - w|^2, at s.theta = v_i; s.value: one number, or [k, 1] if lam is a list  [k, P]
        pull = (lambda s: s.value(self.lam) * (s.theta - w)) if self.lam else None
        v = cohort.train(
            self.v[cohort.ids],
            extra_grad=pull,
            # buffers: v has its own optimizer state; uploaded: v stays with the client
            how=LocalTraining(epochs=self.personal_epochs, buffers="v", throughput_weight=0, uploaded=False),
        ).theta  # throughput_weight=0: throughput counts each sample once
        up = cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": "w"})  # theta - w is sent
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it
        self.v[cohort.ids] = v  # [K, P]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the personal models v_i as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.v[cohort.ids]
