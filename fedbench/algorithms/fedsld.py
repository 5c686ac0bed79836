"""FedSLD: one global model, each sample weighted by how rare its class is in the batch and common in the federation.

Luo and Wu, ISBI 2022, Algorithm 1.  Clients share their label counts once: Pt(c) is the share of class c among all
training samples, pb(c) its share of a batch; the batch loss is the mean (reduction="sum": the sum, as in the paper's
formula) over samples k of  Pt(y_k) / pb(y_k) CE_k,  that is, sum over the classes present of Pt(c) times their mean
cross-entropy.
Departs from the paper: the mean, which needs no other learning rate than FedAvg's (no code is public).
Reduces to: FedAvg where every batch has the federation's class shares.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import require


class FedSLD(FedAvg):
    """renormalize: divide by the sum of Pt over the classes of the batch: otherwise a client with few classes has a
    smaller loss.  State: w [P]; counts_of [N, C], what clients told."""

    def __init__(self, reduction: Literal["mean", "sum"] = "mean", renormalize: bool = False):
        super().__init__()
        self.reduction, self.renormalize = reduction, renormalize

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Classes to weigh."""
        super().check(federation, model, optimizer)
        require(
            federation.task.single_label,
            f"algorithm=fedsld weights classes: it needs one class a sample, not task={federation.task.kind}",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """As FedAvg; clients know their own label counts."""
        super().setup(federation, model, rows)
        self.true_counts = federation.label_counts  # [N, C] on the host
        self.counts_of: Any = None  # nobody asked yet

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        w, prior = cohort.broadcast(w=self.w).w, self.prior(cohort)  # [P], [C]

        def step(s: Step, batch: Batch) -> None:
            batch.weight = batch.weight * self.ratio(batch, prior)  # [k, B]
            s.descend(s.grad(batch))

        up = cohort.upload(theta=cohort.train(w, step=step).theta, relative_to={"theta": "w"})
        self.w = cohort.mean(up.theta)

    def prior(self, cohort: Cohort) -> Tensor:
        """Return Pt over all clients, which the server sends to all of them in the first round.  # [C]"""
        is_first_round = self.counts_of is None
        if is_first_round:
            self.counts_of = self.ask_counts(cohort.all_clients())
        total = self.counts_of.sum(0)
        prior = total / total.sum().clamp_min(1e-30)
        return cohort.all_clients().broadcast(prior=prior, uncompressed=["prior"]).prior if is_first_round else prior

    def ask_counts(self, clients: Cohort) -> Tensor:
        """Label counts of all clients, C numbers each; noise (privacy) may have taken some below 0.  # [N, C]"""
        counts = torch.from_numpy(self.true_counts).to(self.w)
        told = clients.upload(counts=counts, replaces={"counts": None}, uncompressed=["counts"])
        return told.counts.clamp_min(0)

    def ratio(self, batch: Batch, prior: Tensor) -> Tensor:
        """Pt(y) / pb(y) of every sample, 0 for padding.  # [k, B]"""
        real = batch.weight > 0
        pb = batch.weight.new_zeros(len(batch.y), len(prior)).scatter_add(1, batch.y, batch.weight)  # [k, C]
        ratio = torch.where(real, prior[batch.y] / pb.gather(1, batch.y), 0)
        if self.renormalize:
            ratio = ratio / (batch.weight * ratio).sum(1, keepdim=True)
        return ratio * real.sum(1, keepdim=True) if self.reduction == "sum" else ratio
