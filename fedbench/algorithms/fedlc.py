"""FedLC: logits are calibrated by the label frequencies of each client.

Zhang et al., ICML 2022.  With n_i[c] training samples of class c at client i:

    loss = CE(l - tau n_i^(-1/4), y)

A class that the client does not have leaves the softmax, as its shift is infinite.  The server averages as FedAvg.
In segmentation n_i are numbers of pixels.
Departs from the paper: n_i are counted over all training samples, so no loss is infinite.  PFLlib counts the samples
of all clients together, which shifts the logits of all clients equally.
Reduces to: FedAvg if all clients have equally many samples of each class.
"""

import dataclasses

import torch
from torch import Tensor

from fedbench.algorithms._distillation import require_classes
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import PerClient, per_client


class FedLC(FedAvg):
    """FedLC.  w: server model; n [N, C]: training samples of each client and class; tau: strength of the calibration.

    Args:
        tau: Strength of the calibration, >= 0, or a list with one per client.  At 0, absent classes still leave the
            softmax.

    State:
        w: Server model, [P].
    """

    def __init__(self, tau: NonNegative | list[NonNegative] = 1.0):
        super().__init__()
        self.tau: float | PerClient = per_client(tau)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless targets are classes of samples or pixels, because the method counts the classes."""
        super().check(federation, model, optimizer)
        require_classes(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] to the initial model, and n to the number of training samples by client and class.

        # [N, C]
        """
        super().setup(federation, model, rows)  # sets self.w
        self.n = federation.label_counts  # [N, C] on the host

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedLC: clients train with logits that are shifted by class, and the server averages."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        n = torch.from_numpy(self.n[cohort.ids]).to(w)  # samples of each class  [K, C]
        # tau n^(-1/4); cohort.value: one number, or [K, 1] if tau is a list  [K, C]
        shift = cohort.value(self.tau) * n.clamp_min(1).pow(-0.25)
        out = cohort.train(w, loss=self.loss, shift=shift, present=n > 0)  # present: the client has the class
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def loss(self, s: Step, theta: Tensor, batch: Batch) -> Tensor:
        """Return the task's loss of each sample under theta [k, P], with the client's shift subtracted from its logits.

        Classes that the client does not have (s.state.present is False) are left out.  # [k, B]
        """
        logits = s.forward(theta, batch)  # [k, B, C, ...]
        shift = s.state.shift.view(len(logits), 1, -1, *[1] * (logits.dim() - 3))  # [k, 1, C, ...]
        return s.task_loss(logits - shift, dataclasses.replace(batch, class_mask=s.state.present))
