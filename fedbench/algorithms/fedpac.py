"""FedPAC: features are pulled to global prototypes, and each client's head is the best mixture of all heads.

Xu, Tong and Huang, ICLR 2023, Algorithm 1.  On [u, h_i], before training, client i has label shares pi_i, class means
mu_i of its features z, and

    V_i = (sum_c pi_ic E|z|^2_c - pi_ic^2 |mu_ic|^2) / n_i        H_i[c] = pi_ic mu_ic

It trains the head alone by the task's loss, and then the base alone by

    CE + lam mean of (z - G[y])^2                 classes without a prototype count as 0

and uploads u, h_i, V_i, H_i and its class means after training, of which G is the mean.  The server averages u, and
solves a quadratic program for each client:

    a_i = argmin over the simplex of  sum_jl a_j a_l <H_i - H_j, H_i - H_l> + sum_j a_j^2 V_j
    h_i <- sum_j a_ij h_j

Weights below 0.001 become 0, but the largest of a client stay if all are below.
Departs from the paper: a class without a prototype has no second term.  The authors' code pulls its features to the
client's own class mean.  PFLlib weights clients equally in G (weights=uniform).
Reduces to: FedRep with lam = 0 and a_i = e_i.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms._features import (
    ClassStatistics,
    class_statistics,
    features_and_logits,
    features_of_samples,
    mean_prototypes,
    num_features,
    require_features,
    require_labels,
)
from fedbench.algorithms._simplex import minimize_on_simplex
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
from fedbench.core.options import Count, NonNegative, Positive
from fedbench.engine.per_client import PerClient, per_client

SMALLEST_WEIGHT = 1e-3  # smaller weights of heads become 0, as in the released code


class FedPAC(Algorithm):
    """FedPAC.  u: shared base; h_i: personal head; G: prototypes, the mean features of each class in has_prototype.

    Args:
        lam: Weight of the distance to the prototypes, >= 0, or a list with one per client.
        head_epochs: Epochs of head training, with the base frozen.
        head_lr: Learning rate of the head.  None: that of the base.
        weights: How the server averages prototypes: "samples" of the class, as in the paper, or "uniform".

    State:
        u: Averaged base, [|base|].
        h: Mixed heads, [N, |head|].
        G: Prototypes, [C, F].  has_prototype: Whether each class has one, 0 or 1, [C].
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        lam: NonNegative | list[NonNegative] = 1.0,
        head_epochs: Count = 1,
        head_lr: Positive | None = None,
        weights: Literal["samples", "uniform"] = "samples",
    ):
        self.lam: float | PerClient = per_client(lam)
        self.head_epochs, self.head_lr, self.weights = head_epochs, head_lr, weights

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's base u [|u|] and the clients' heads h_i [N, |head|] to those of the initial model.

        The mean features G [C, F] of the classes are 0 until clients upload theirs.  `rows` stores h_i.
        """
        self.base = model.without("head")  # columns of all parameters outside the head
        self.head = self.base.rest(model.size)  # all other columns of a row
        w = model.init_row()
        self.u = self.base.take(w).clone()  # [|u|]
        self.h = rows("h", default=self.head.take(w))  # [N, |head|]; a row equals the default until it is set
        self.num_classes = federation.num_classes
        self.G = torch.zeros(self.num_classes, num_features(model), device=federation.device)  # [C, F]
        self.has_prototype = torch.zeros(self.num_classes, device=federation.device)  # [C], 0 or 1

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedPAC: clients train; the server averages bases and prototypes, and mixes heads.

        G are the prototypes, mean features of each class.  V_i and H_i describe the client's features; by these the
        server computes the weights a_ij with which it mixes all heads h_j to client i's next one.
        """
        server = cohort.broadcast(u=self.u, G=self.G, has_prototype=self.has_prototype, uncompressed=["has_prototype"])
        theta = self.with_heads(cohort, server.u)  # [K, P]
        before = self.statistics(cohort, theta)  # counts and means of each class's features, before training
        theta = self.train(cohort, theta, server.G, server.has_prototype)
        after = self.statistics(cohort, theta)
        V, H = self.variance_and_means(cohort, before)  # [K], [K, C, F]
        up = cohort.upload(
            u=self.base.take(theta),
            h=self.head.take(theta),
            V=V,
            H=H,
            means=after.means,
            counts=after.counts,
            relative_to={"u": "u", "h": "h"},  # the changes of the received u and h are sent
            previous={"V": None, "H": None, "means": None, "counts": None},  # None: sent as they are
            uncompressed=["V", "counts"],
        )
        self.u = cohort.mean(up.u, updates="u")  # the new u: the mean, or the step of the option server towards it
        by_samples = self.weights == "samples"  # else all clients with a class have the same weight
        self.G, self.has_prototype = mean_prototypes(cohort, up.means, up.counts, by_samples=by_samples)
        a = self.head_weights(up.V, up.H)  # [K, K]
        self.h[cohort.ids] = a @ up.h

    def with_heads(self, cohort: Cohort, u: Tensor) -> Tensor:
        """Send each sampled client its head h_i, and return the whole models of the base u [|u|] and these heads.

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = u.new_empty(len(cohort), self.base.size + self.head.size)
        return self.head.put(self.base.put(rows, u), cohort.download(h=self.h[cohort.ids]).h)

    def train(self, cohort: Cohort, theta: Tensor, G: Tensor, has_prototype: Tensor) -> Tensor:
        """Train the heads, and then the bases.

        Args:
            cohort: The clients.
            theta: Rows from which they start.  # [K, P]
            G: The received prototypes.  # [C, F]
            has_prototype: Whether each class has one, 0 or 1.  # [C]

        Returns:
            The trained rows.  # [K, P]
        """

        def loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            """Return the task's loss plus lam times the squared distance of features to their class's prototype.

            The distance is the mean over features, and 0 for a class without prototype.  # [k, B]
            """
            z, logits = features_and_logits(s, rows, batch)  # [k, B, F], [k, B, C]
            distance = (z - G[batch.y]).square().mean(2) * has_prototype[batch.y]  # [k, B]
            # s.value: one number, or [k, 1] if lam is a list
            return s.task_loss(logits, batch) + s.value(self.lam) * distance

        # key, buffers: the head has its own batches and optimizer state
        first = LocalTraining(epochs=self.head_epochs, lr=self.head_lr, key="head", buffers="head", uploaded=self.head)
        theta = cohort.train(theta, columns=self.head, how=first).theta
        # uploaded: the columns that leave the client, whose gradients privacy clips
        return cohort.train(theta, loss=loss, columns=self.base, how=LocalTraining(uploaded=self.base)).theta

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        """Return the counts [K, C] and mean features [K, C, F] of each client's training samples, by class.

        theta [K, P] are the clients' models.  The mean of a class without samples is 0.
        """
        return class_statistics(*features_of_samples(cohort, theta), self.num_classes)

    def variance_and_means(self, cohort: Cohort, statistics: ClassStatistics) -> tuple[Tensor, Tensor]:
        """Return each client's scaled class means H_i, estimated from its n_i samples, and their variance V_i.

        Args:
            cohort: The clients.
            statistics: Their class counts, and by class the mean and the mean squared norm of features, before
                training.

        Returns:
            V_i = (sum_c pi_ic E|z|^2_c - pi_ic^2 |mu_ic|^2) / n_i [K], and H_i[c] = pi_ic mu_ic [K, C, F], for label
            shares pi_i and class means mu_i of the features z.
        """
        pi = statistics.counts / statistics.counts.sum(1, keepdim=True).clamp_min(1)  # label shares  [K, C]
        variance = (pi * statistics.squares - pi.square() * statistics.means.square().sum(2)).sum(1)  # [K]
        # the variance of one sample, divided by n_i: that of the mean of n_i samples
        return variance / cohort.num_samples.clamp_min(1), pi[..., None] * statistics.means

    def head_weights(self, V: Tensor, H: Tensor) -> Tensor:
        """Solve each client's quadratic program for the weights of all heads in its own.

        a_i minimizes |H_i - sum_j a_ij H_j|^2 + sum_j a_ij^2 V_j over all weights >= 0 of sum 1.

        Args:
            V: Variances of H.  # [K]
            H: Scaled class means of the clients.  # [K, C, F]

        Returns:
            a_ij, the weight of head j in the head of client i; rows sum to 1.  # [K, K]
        """
        v = V.double().clamp_min(0).cpu().numpy()  # privacy noise may make V negative  [K]
        H_flat = H.flatten(1).double().cpu().numpy()  # [K, C F]
        a = np.stack([minimize_on_simplex((H_i - H_flat) @ (H_i - H_flat).T + np.diag(v)) for H_i in H_flat])
        # The largest weights of a row stay: else more than 1,000 equal clients would have none.
        a[a < np.minimum(SMALLEST_WEIGHT, a.max(1, keepdims=True))] = 0  # below 0.001, as in the released code
        return torch.from_numpy(self.normalized(a)).to(H)  # rows sum to 1 again

    def normalized(self, a: np.ndarray) -> np.ndarray:
        """Scale each client's weights, the rows of a [K, K], to a sum of 1.  # [K, K]"""
        return a / a.sum(1, keepdims=True)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: shared base u with each client's mixed head h_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.with_heads(cohort, cohort.broadcast(u=self.u).u)
