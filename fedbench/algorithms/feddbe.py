"""FedDBE: domain bias eliminator, a personal shift of the features and a pull of their mean to a global mean.

Zhang et al., NeurIPS 2023, Algorithm 1.  With features z of theta_i, the client's shift c_i [F], the running mean r of
the batch means of z (from 0 in each round) and the global mean g:

    before round 1: all clients train from w by the plain loss and upload r;  g = sum n_i r_i / n
    r <- (1 - m) r + m mean(z)
    loss = task loss of head(z + c_i) + kappa mean over F of (r - g)^2 / 2         gradient through this batch's share m

theta_i and c_i descend together.  The server averages theta_i.  Deployed: w with c_i added to the features.
In segmentation c_i has one number per channel, and means are over pixels, too.
Departs from the paper: nowhere.   Reduces to: FedAvg with kappa = 0 and c_i = 0.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fedbench.algorithms._features import num_features, refuse_features_of_tokens, require_features
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    Inputs,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.options import Fraction, NonNegative
from fedbench.engine.per_client import PerClient, per_client


class FedDBE(Algorithm):
    """FedDBE.  c_i [F]: shift of client i's features; r: running mean of its features; g: global mean.

    Args:
        kappa: Weight of the distance between the running mean and the global mean, >= 0, or a list with one per client.
        m: Weight of a batch in the running mean of features, in (0, 1].

    State:
        w: Server model, [P]; its columns "shift" are zero.
        c: Shifts, [N, F].
        g: Global mean of features, [F].  has_g: Whether the clients have uploaded their means, [] bool.
    """

    requires = ("head",)

    def __init__(self, kappa: NonNegative | list[NonNegative] = 50.0, m: Fraction = 1.0):
        self.kappa: float | PerClient = per_client(kappa)
        self.m = m

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model has a linear head, whose input is the features.

        Token sequences as samples are an error, too.
        """
        super().check(federation, model, optimizer)
        require_features(model, self._name)
        refuse_features_of_tokens(federation, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add a vector "shift" of F features to the model; set the server model w, the clients' shifts and the mean.

        w [P] is the initial model.  The shifts c_i [N, F], stored by `rows`, are 0.  The global mean g [F] of the
        features is unknown until the clients upload theirs.
        """
        self.g = torch.zeros(num_features(model), device=federation.device)  # [F]
        self.has_g = torch.zeros((), dtype=torch.bool)  # on the host, where reading it does not wait for a GPU
        model.extend(shift=self.g)  # new columns "shift" in every row, at first 0
        self.shift = model.columns["shift"]
        self.shared = self.shift.rest(model.size)  # all other columns
        self.w = model.init_row()  # [P]
        self.c = rows("c", default=self.g)  # [N, F]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedDBE: clients train from w with their shift c_i, and the server averages w.

        c_i is added to the client's features.  g is the mean of features over all clients, computed before round 1, and
        r the running mean of a client's features in this round.  `shared` are all columns except the shift.
        """
        if not self.has_g:  # before round 1
            self.g = self.global_mean(cohort.all_clients())
            self.has_g = torch.ones_like(self.has_g)
        w = cohort.broadcast(w=self.shared.take(self.w)).w
        start = self.with_shifts(cohort, w)  # rows of w and c_i  [K, P]
        # uploaded: the columns that leave the client, whose gradients privacy clips
        r, how = self.g.new_zeros(len(cohort), len(self.g)), LocalTraining(uploaded=self.shared)
        out = cohort.train(start, loss=self.loss, how=how, r=r, g=self.g.expand_as(r))
        self.c[cohort.ids] = self.shift.take(out.theta)
        up = cohort.upload(w=self.shared.take(out.theta), relative_to={"w": "w"})  # the change of w is sent
        self.w = self.shared.put(self.w, cohort.mean(up.w, updates="w"))  # or the option server's step to it

    def global_mean(self, everybody: Cohort) -> Tensor:
        """Let all clients train once, and return the mean of the running means of their features.

        It runs before round 1.  The trained models are discarded.

        Args:
            everybody: All N clients.

        Returns:
            The global mean g, as the clients receive it.  # [F]
        """
        start = self.shared.put(self.w, everybody.broadcast(w=self.shared.take(self.w)).w)
        # shared: all columns but the shift; uploaded=False: the trained parameters stay with the clients; key: of the
        # random batches; fresh: without optimizer state
        once = LocalTraining(key="means", optimizer=everybody.engine.optimizer.fresh(), uploaded=False)
        r = self.g.new_zeros(len(everybody), len(self.g))  # [N, F]
        out = everybody.train(start, loss=self.plain_loss, columns=self.shared, how=once, r=r)
        up = everybody.upload(r=out.r, previous={"r": None})  # None: r is sent as it is
        return everybody.broadcast(g=everybody.mean(up.r)).g

    def plain_loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Return the task's loss of each sample without shift; also update the running mean r with the batch.

        # [k, B]
        """
        z = s.features(rows, batch)  # [k, B, F]
        self.move_mean(s, z, batch)
        return s.task_loss(s.model.head(rows, z), batch)

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Return the loss of the shifted features plus kappa times the distance of r to g.  # [k, B]

        It updates the running mean r with this batch.  s.value(kappa) is one number, or [k, 1] if kappa is a list.
        """
        z = s.features(rows, batch)  # [k, B, F]
        r = self.move_mean(s, z, batch)  # [k, F]
        distance = (r - s.state.g).square().mean(1, keepdim=True) / 2  # [k, 1]
        return s.task_loss(self.shifted_logits(s.model, rows, z), batch) + s.value(self.kappa) * distance

    def move_mean(self, s: Step, z: Tensor, batch: Batch) -> Tensor:
        """Update the running mean r of each client's features with a batch, whose weight is the option m.

        Args:
            s: The step of k clients; s.state.r is r [k, F].
            z: Features of the batch.  # [k, B, F, ...]
            batch: The batch.

        Returns:
            The new r, whose gradient passes through this batch only.  # [k, F]
        """
        # batch.weight: weights of the samples, of sum 1; a mean over samples, and a sum over pixels, if any  [k, F]
        mean = torch.einsum("kbf...,kb->kf", z, batch.weight)
        r = (1 - self.m) * s.state.r + self.m * mean / math.prod(z.shape[3:])  # divided by the number of pixels
        s.state.r.copy_(r.detach())
        return r

    def shifted_logits(self, model: FlatModel, rows: Tensor, z: Tensor) -> Tensor:
        """Return the logits of the head for features plus a shift.

        Args:
            model: The model.
            rows: The models of k clients, each with its shift c_i.  # [k, P]
            z: Features of B samples of each client.  # [k, B, F, ...]

        Returns:
            Logits of z + c_i.  # [k, B, C, ...]
        """
        c = model.named(rows)["shift"]  # [k, F]
        return model.head(rows, z + c.view(len(c), 1, -1, *[1] * (z.dim() - 3)))

    def with_shifts(self, cohort: Cohort, w: Tensor) -> Tensor:
        """Return the sampled clients' whole models: the shared part w [|w|] and each client's own shift c_i.

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns
        return self.shift.put(self.shared.put(self.w, w), self.c[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: w with each client's shift c_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.with_shifts(cohort, cohort.broadcast(w=self.shared.take(self.w)).w)

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits for inputs [k, b, ...] of k clients with models rows [k, P], each with its shift.

        # [k, b, C, ...]
        """
        return self.shifted_logits(model, rows, model.features(rows, inputs))

    def global_row(self) -> Tensor:
        """Return the server model w, in which the shift of the features is 0.  # [P]"""
        return self.w
