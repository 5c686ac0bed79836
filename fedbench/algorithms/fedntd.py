"""FedNTD: distillation of the server's model on all classes but the true one keeps what it knows of them.

Lee et al., NeurIPS 2022, Algorithm 1.  With q(l) the softmax of the logits l / tau without the true class, logits l of
theta and l_w of the received w:

    loss = CE + beta tau^2 KL(q(l_w) || q(l))

Departs from the paper: l_w are computed in evaluation mode (dropout off, running statistics of batch norm).
Reduces to: FedAvg with beta = 0, with two classes, and with one local step.
"""

import torch
from torch import Tensor

from fedbench.algorithms._features import require_labels
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative, Positive
from fedbench.engine.per_client import PerClient, per_client

EXCLUDED = -1e9  # logit of a class that leaves the softmax


class FedNTD(FedAvg):
    """FedNTD.  w: server model; beta: weight of the distillation; tau: its temperature.

    Args:
        beta: Weight of the distillation, >= 0, or a list with one per client.
        tau: Temperature of the distillation, > 0.

    State:
        w: Server model, [P].
    """

    def __init__(self, beta: NonNegative | list[NonNegative] = 1.0, tau: Positive = 1.0):
        super().__init__()
        self.beta: float | PerClient = per_client(beta)
        self.tau = tau

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedNTD (Algorithm 1): clients train with distillation from w, and the server averages."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]

        def loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:
            """Return the task's loss plus beta tau^2 times the divergence from w's predictions, without the true class.

            w is the received server model, and theta are the trained models.  # [k, B]
            """
            logits = s.forward(theta, batch)  # [k, B, C]
            # log probabilities without the true class, of the received w and of theta
            with torch.no_grad():
                log_q_w = self.not_true(s.model.predict(w.expand(s.k, -1), batch.x), batch)
            log_q = self.not_true(logits, batch)  # [k, B, C]
            kl = (log_q_w.exp() * (log_q_w - log_q)).sum(2)  # [k, B]
            # s.value: one number, or [k, 1] if beta is a list
            return s.task_loss(logits, batch) + s.value(self.beta) * self.tau**2 * kl

        out = cohort.train(w, loss=loss if self.beta else None)  # None: the task's loss
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def not_true(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the log softmax of logits / tau over the client's classes except the sample's true class.

        Args:
            logits: Logits of k clients.  # [k, B, C]
            batch: Their batch, with the true classes.

        Returns:
            Log probabilities log q(l); about -1e9 for excluded classes.  # [k, B, C]
        """
        classes = torch.arange(logits.shape[2], device=logits.device)
        excluded = batch.y[..., None] == classes  # [k, B, C]
        if batch.class_mask is not None:
            excluded = excluded | ~batch.class_mask[:, None]
        # EXCLUDED is -1e9, a logit of probability 0
        return (logits / self.tau).masked_fill(excluded, EXCLUDED).log_softmax(2)
