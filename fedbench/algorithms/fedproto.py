"""FedProto: clients share class means of features (prototypes) instead of parameters.

Tan et al., AAAI 2022, Algorithm 1.  With features z of theta_i and the server's prototypes G [C, F]:

    loss = CE + lam mean of (z - G[y])^2             classes without a prototype count as 0
    prototype of class c at client i: mean of z over its samples of c in this round's training
    G[c] = mean of the clients' prototypes, weighted by their samples of c

Prediction: the class of the nearest prototype.
Departs from the paper: prototypes are means over all batches of the round, as in PFLlib, so they need no further pass.
Released codes weight clients equally (weights=uniform).  A class that no client of the round has loses its prototype.
An upload shows which classes a client has.
Reduces to: Local with lam = 0, but for the prediction.
"""

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms._features import (
    features_and_logits,
    mean_prototypes,
    num_features,
    require_features,
    require_labels,
)
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
from fedbench.core.options import NonNegative
from fedbench.engine.per_client import PerClient, per_client


class FedProto(Algorithm):
    """FedProto.  theta_i: model of client i; G [C, F]: prototypes, mean features of each class in has_prototype [C].

    Args:
        lam: Weight of the distance to the prototypes, >= 0, or a list with one per client.
        weights: How the server averages prototypes: "samples" of the class, as in the paper, or "uniform".
        predict_by: "prototypes", the class of the nearest prototype, or "head", the local classifier.

    State:
        theta: Client models, [N, P].
        G: Prototypes, [C, F].  has_prototype: Whether each class has one, 0 or 1, [C].
    """

    requires = ("head",)

    def __init__(
        self,
        lam: NonNegative | list[NonNegative] = 1.0,
        weights: Literal["samples", "uniform"] = "samples",
        predict_by: Literal["prototypes", "head"] = "prototypes",
    ):
        self.lam: float | PerClient = per_client(lam)
        self.weights, self.predict_by = weights, predict_by

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the clients' models theta_i [N, P] to the initial model, and mark all prototypes as missing.

        A prototype [F] is the mean feature of a class.  G [C, F] has those of all classes, at first 0.  `rows` stores
        theta_i.
        """
        self.theta = rows("theta", default=model.init_row())  # [N, P]; a row equals the default until it is set
        self.num_classes = federation.num_classes
        self.G = torch.zeros(self.num_classes, num_features(model), device=federation.device)  # [C, F]
        self.has_prototype = torch.zeros(self.num_classes, device=federation.device)  # [C], 0 or 1

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedProto: clients train towards prototypes; the server averages their class means."""
        server = self.send_prototypes(cohort)
        sums = self.G.new_zeros(len(cohort), *self.G.shape)  # [K, C, F]
        counts = sums.new_zeros(len(cohort), self.num_classes)  # [K, C]

        def loss(s: Step, theta: Tensor, batch: Batch) -> Tensor:
            """Return the task's loss plus lam times the squared distance of features to the prototype.  # [k, B]

            theta [k, P] are the trained models.  It also adds the features to the sums by class.  server.G are the
            received prototypes of the classes in server.has_prototype.
            """
            z, logits = features_and_logits(s, theta, batch)  # [k, B, F], [k, B, C]
            one_hot = self.one_hot(batch)  # [k, B, C], 0 for padding
            s.state.sums.add_(one_hot.mT @ z.detach())  # sums of features by class, for the prototypes
            s.state.counts.add_(one_hot.sum(1))  # samples of each class so far  [k, C]
            distance = (z - server.G[batch.y]).square().mean(2) * server.has_prototype[batch.y]  # [k, B]
            # s.value: one number, or [k, 1] if lam is a list
            return s.task_loss(logits, batch) + s.value(self.lam) * distance

        start, how = self.theta[cohort.ids], LocalTraining(uploaded=False)  # parameters are not uploaded
        out = cohort.train(start, loss=loss, how=how, sums=sums, counts=counts)
        self.theta[cohort.ids] = out.theta
        means = out.sums / out.counts.clamp_min(1)[..., None]  # [K, C, F]
        up = cohort.upload(
            means=means,
            counts=out.counts,
            previous={"means": None, "counts": None},  # None: sent as they are, because the server has no version
            uncompressed=["counts"],
        )
        by_samples = self.weights == "samples"  # else all clients with a class have the same weight
        self.G, self.has_prototype = mean_prototypes(cohort, up.means, up.counts, by_samples=by_samples)

    def send_prototypes(self, cohort: Cohort) -> SimpleNamespace:
        """Send the prototypes to the cohort, and return them as received, which compression may change.

        Args:
            cohort: The receiving clients.

        Returns:
            A namespace: G [C, F] is the mean feature of each class; has_prototype [C] is 1 if G has this class, else 0.
        """
        return cohort.broadcast(G=self.G, has_prototype=self.has_prototype, uncompressed=["has_prototype"])

    def one_hot(self, batch: Batch) -> Tensor:
        """Return the classes batch.y [k, B] as one-hot vectors; those of padding samples are all 0.  # [k, B, C]"""
        classes = torch.arange(self.num_classes, device=batch.y.device)
        return ((batch.y[..., None] == classes) & batch.real[..., None]).to(self.G)

    def personalized(self, cohort: Cohort, final: bool) -> Any:
        """Return what the cohort deploys: the models, and the prototypes for prediction.

        `final`, whether the last round is over, changes nothing.

        Returns:
            A dict of theta [K, P].  With predict_by="prototypes", once there are prototypes, also G [K, C, F] and
            has_prototype [K, C].
        """
        theta = self.theta[cohort.ids]
        if self.predict_by == "head" or not bool(self.has_prototype.any()):
            return {"theta": theta}
        server, K = self.send_prototypes(cohort), len(cohort)
        return {
            "theta": theta,
            "G": server.G.expand(K, -1, -1),
            "has_prototype": server.has_prototype.expand(K, -1),
        }

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return minus the squared distances of the features to the class prototypes, as logits.

        Args:
            model: The model.
            rows: Output of `personalized` for k clients.  Without "G", the logits are those of the head.
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            Logits; the lowest number for a class without a prototype.  # [k, b, C]
        """
        if "G" not in rows:
            return model.predict(rows["theta"], inputs)
        z = model.features(rows["theta"], inputs)  # [k, b, F]
        distances = torch.cdist(z, rows["G"]).square()  # [k, b, C]
        return -distances.masked_fill(rows["has_prototype"][:, None] == 0, torch.finfo(distances.dtype).max)
