"""FedSLD: FedAvg with samples weighted by the federation's class shares over those of the batch.

Luo and Wu, ISBI 2022, Algorithm 1 (shared label distribution).  Clients upload their label counts once.  Pt(c) is the
share of class c among all training samples, pb(c) its share of a batch.  The batch loss is the mean over samples k of
Pt(y_k) / pb(y_k) CE_k,  which equals the sum over the classes present of Pt(c) times their mean cross-entropy.
reduction="sum" takes the sum over samples, as in the paper's formula.
Departs from the paper: the mean over samples, which suits FedAvg's learning rate (no code is public).
Reduces to: FedAvg where every batch has the federation's class shares.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms._features import require_labels
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg


class FedSLD(FedAvg):
    """FedSLD.  w: server model; counts_of [N, C]: uploaded label counts; Pt [C]: class shares among all samples.

    Args:
        reduction: "mean" or "sum" of the weighted losses of a batch.
        renormalize: Whether to divide by the sum of Pt over the classes of the batch.  Otherwise clients with few
            classes have smaller losses.

    State:
        w: Server model, [P].
        counts_of: Uploaded label counts, [N, C].
    """

    def __init__(self, reduction: Literal["mean", "sum"] = "mean", renormalize: bool = False):
        super().__init__()
        self.reduction, self.renormalize = reduction, renormalize

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] to the initial model, and count each client's training samples by class.

        # [N, C]
        """
        super().setup(federation, model, rows)  # sets self.w
        self.true_counts = federation.label_counts  # [N, C] on the host
        self.counts_of: Any = None  # before the upload in the first round

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedSLD: clients train with samples weighted by class, and the server averages."""
        w, prior = cohort.broadcast(w=self.w).w, self.prior(cohort)  # [P], [C]

        def step(s: Step, batch: Batch) -> None:
            batch.weight = batch.weight * self.ratio(batch, prior)  # weight of each sample in the mean loss  [k, B]
            s.descend(s.grad(batch))

        up = cohort.upload(theta=cohort.train(w, step=step).theta, relative_to={"theta": "w"})  # theta - w is sent
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def prior(self, cohort: Cohort) -> Tensor:
        """Return Pt, the share of each class among all training samples.

        In the first round all clients upload their label counts, and receive Pt.

        Args:
            cohort: The clients of this round.

        Returns:
            The shares.  # [C]
        """
        is_first_round = self.counts_of is None
        if is_first_round:
            self.counts_of = self.upload_counts(cohort.all_clients())
        total = self.counts_of.sum(0)
        prior = total / total.sum().clamp_min(1e-30)  # no division by 0
        return cohort.all_clients().broadcast(prior=prior, uncompressed=["prior"]).prior if is_first_round else prior

    def upload_counts(self, clients: Cohort) -> Tensor:
        """Upload the label counts of all clients, and return them as received; negative ones become 0.

        Args:
            clients: All N clients.

        Returns:
            Number of training samples by client and class.  Privacy noise may change it.  # [N, C]
        """
        counts = torch.from_numpy(self.true_counts).to(self.w)
        # None: the counts are sent as they are, because the server has no version
        up = clients.upload(counts=counts, previous={"counts": None}, uncompressed=["counts"])
        return up.counts.clamp_min(0)

    def ratio(self, batch: Batch, prior: Tensor) -> Tensor:
        """Return the weight Pt(y) / pb(y) of every sample: its class's share among all samples over that in its batch.

        Args:
            batch: One batch of every client.
            prior: Pt, the federation's class shares.  # [C]

        Returns:
            The weights, 0 for padding.  renormalize divides by their mean, reduction="sum" multiplies by the number of
            samples.  # [k, B]
        """
        real = batch.weight > 0  # False for padding  [k, B]
        # share of each class in the batch
        pb = batch.weight.new_zeros(len(batch.y), len(prior)).scatter_add(1, batch.y, batch.weight)  # [k, C]
        ratio = torch.where(real, prior[batch.y] / pb.gather(1, batch.y), 0)
        if self.renormalize:
            ratio = ratio / (batch.weight * ratio).sum(1, keepdim=True)
        return ratio * real.sum(1, keepdim=True) if self.reduction == "sum" else ratio
