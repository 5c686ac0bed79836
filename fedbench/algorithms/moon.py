"""MOON: a contrastive term pulls features to those of the server's model and away from those of the client's last one.

Li, He and Song, CVPR 2021, Algorithm 1.  With features z of theta, z_g of w and z_old of the client's last model v_i:

    loss = CE + mu mean of -log(exp(cos(z, z_g) / tau) / (exp(cos(z, z_g) / tau) + exp(cos(z, z_old) / tau)))

Departs from the paper: z are the inputs of the model's head, not of a projection head that is added to the model.
z_g and z_old are computed in evaluation mode (dropout off, running statistics of batch norm).
Reduces to: FedAvg with mu = 0, and in round 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.algorithms._features import features_and_logits, frozen_features, require_features
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative, Positive
from fedbench.engine.per_client import PerClient, per_client


class Moon(FedAvg):
    """MOON.  v_i: client i's model of its last round; mu, tau: weight and temperature of the contrastive term.

    Args:
        mu: Weight of the contrastive term, >= 0, or a list with one per client.
        tau: Temperature, > 0.

    State:
        w: Server model, [P].
        v: Client models as last trained, [N, P].
    """

    requires = ("head",)

    def __init__(self, mu: NonNegative | list[NonNegative] = 1.0, tau: Positive = 0.5):
        super().__init__()
        self.mu: float | PerClient = per_client(mu)
        self.tau = tau

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model has a linear head, whose input is the features."""
        super().check(federation, model, optimizer)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the clients' last trained models v_i [N, P] to the initial model.

        `rows` stores v_i.
        """
        super().setup(federation, model, rows)  # sets self.w
        self.v = rows("v", default=self.w)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of MOON: clients train from w with the contrastive term, and the server averages.

        The term pulls features to those under w, and away from those under v_i, the client's last model.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]

        def loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:
            """Return the task's loss plus mu times the contrastive term.  # [k, B]

            theta [k, P] are the trained models.  Features z shall be near z_g, those under the server's w, and far from
            z_old, those under the old model.
            """
            z, logits = features_and_logits(s, theta, batch)  # [k, B, F], [k, B, C]
            z_g = frozen_features(s, w, batch)  # [k, B, F]
            z_old = frozen_features(s, s.state.v, batch)  # under v_i, the client's last model  [k, B, F]
            near = F.cosine_similarity(z.flatten(2), z_g.flatten(2), dim=2) / self.tau  # [k, B]
            far = F.cosine_similarity(z.flatten(2), z_old.flatten(2), dim=2) / self.tau  # [k, B]
            # -log(exp(near) / (exp(near) + exp(far))); s.value: one number, or [k, 1] if mu is a list
            return s.task_loss(logits, batch) + s.value(self.mu) * (torch.logaddexp(near, far) - near)

        out = cohort.train(w, loss=loss, v=self.v[cohort.ids]) if self.mu else cohort.train(w)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it
        self.v[cohort.ids] = out.theta
