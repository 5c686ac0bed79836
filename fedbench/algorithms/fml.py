"""FML: each client trains a personal model and a copy of the server's model, which teach each other.

Shen et al., 2020, Algorithm 1.  On each batch, with p the softmax of the logits of the personal model theta_i and of
the copy g of w, and all right-hand sides evaluated before the step:

    L   = alpha CE(theta_i) + (1 - alpha) KL(p_g || p_theta)      theta_i <- theta_i - eta grad L
    L_g = beta CE(g) + (1 - beta) KL(p_theta || p_g)              g <- g - eta grad L_g

The server averages g uniformly.  theta_i is never uploaded.  Deployed: theta_i.
Departs from the paper: both steps use the predictions before the step, as the released code of PFLlib.  There both
models descend L + L_g (targets=live), KL is also divided by the number of classes (kl=mean), and gradients are clipped
at norm 10 (optimizer.clip=10).
Reduces to: Local beside uniformly weighted FedAvg with alpha = beta = 1.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms._distillation import Reduction, kl, log_probabilities, require_classes
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.options import Probability
from fedbench.engine.per_client import PerClient, per_client


class FML(Algorithm):
    """FML.  theta_i: personal model of client i; g: its copy of the server model w.

    Args:
        alpha: Weight of the cross-entropy of theta_i, in [0, 1], or a list with one per client.
        beta: Weight of the cross-entropy of g, in [0, 1], or a list with one per client.
        targets: "fixed": no gradient through the other model's predictions.  "live": both models descend L + L_g.
        kl: Whether the divergence is the "sum" over classes, or their "mean".

    State:
        w: Server model, [P].
        theta: Personal models, [N, P].
    """

    def __init__(
        self,
        alpha: Probability | list[Probability] = 0.5,
        beta: Probability | list[Probability] = 0.5,
        targets: Literal["fixed", "live"] = "fixed",
        kl: Reduction = "sum",
    ):
        self.alpha: float | PerClient = per_client(alpha)
        self.beta: float | PerClient = per_client(beta)
        self.targets = targets
        self.kl: Reduction = kl

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample or pixel has one class."""
        super().check(federation, model, optimizer)
        require_classes(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the personal models theta_i [N, P], stored by `rows`, to the initial model."""
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FML: clients train theta_i and a copy g of w, which teach each other; g is averaged."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        # names under which the optimizer states of g and theta_i are stored, if they are kept between rounds
        how = LocalTraining(buffers={"theta": "theta", "personal": "personal"})
        out = cohort.train(w, step=self.step, how=how, personal=self.theta[cohort.ids])
        self.theta[cohort.ids] = out.personal
        up = cohort.upload(g=out.theta, relative_to={"g": "w"})  # [K, P]; g - w is sent, and the server adds w
        self.w = cohort.mean(up.g, weights="uniform", updates="w")  # or the option server's step towards the mean

    def step(self, s: Step, batch: Batch) -> None:
        """Take one local step of both models of each client: s.theta is g, s.state.personal is theta_i.

        alpha and beta are the weights of the cross-entropy in the losses of theta_i and g; s.value gives those of the
        step's clients, if they differ.
        """

        def L(s: Step, theta: Tensor, batch: Batch) -> Tensor:  # loss of theta_i, which g teaches  [k, B]
            return self.loss(s, theta, s.theta, batch, a=s.value(self.alpha), b=s.value(self.beta))

        def L_g(s: Step, g: Tensor, batch: Batch) -> Tensor:  # loss of g, which theta_i teaches  [k, B]
            return self.loss(s, g, s.state.personal, batch, a=s.value(self.beta), b=s.value(self.alpha))

        at_theta = s.grad(batch, rows=s.state.personal, loss=L)
        at_g = s.grad(batch, loss=L_g)
        s.descend(at_theta, name="personal", uploaded=False)  # theta_i stays with the client
        s.descend(at_g)

    def loss(self, s: Step, rows: Tensor, others: Tensor, batch: Batch, a: float | Tensor, b: float | Tensor) -> Tensor:
        """Return a CE(rows) + (1 - a) KL(p_others || p_rows); targets="live" adds (1 - b) KL(p_rows || p_others).

        Args:
            s: The step.
            rows: The differentiated models.  # [k, P]
            others: The models that teach them.  # [k, P]
            batch: One batch of every client.
            a: Weight of the cross-entropy of rows.
            b: Weight of the cross-entropy of others.

        Returns:
            The losses.  # [k, B]
        """
        logits = s.forward(rows, batch)  # [k, B, C, ...]
        with torch.no_grad():
            log_p_others = log_probabilities(s.forward(others, batch), batch)
        log_p = log_probabilities(logits, batch)
        loss = a * s.task_loss(logits, batch) + (1 - a) * kl(log_p_others, log_p, over_classes=self.kl)
        if self.targets == "live":
            loss = loss + (1 - b) * kl(log_p, log_p_others, over_classes=self.kl)
        return loss

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the personal models theta_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
