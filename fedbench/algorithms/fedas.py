"""FedAS: clients align the server's base with their own features before they train; the server weights by gradients.

Yang, Huang and Ye, CVPR 2024.  Client i keeps theta_i.  With class means mu_c of its features under theta_i, it trains
the base u of the received w for one pass over batches of 16 samples at rate 0.01:

    loss = sum over classes c of the batch of mean |z - mu_c|^2 / F         z: features under u
    theta_i <- [u, head of theta_i], and then local training of all columns

After training, t_i is the sum over batches of |gradient of the batch's loss|^2, and w <- sum t_i theta_i / sum t_i.
Deployed: theta_i as last trained.
Departs from the paper: t_i sums gradients of batches, as the released code.  The trace of the Fisher matrix, as the
paper names it, sums gradients of samples (fisher_batch_size=1).  Class means are over all training samples.
Reduces to: the training of FedPer with align_lr = 0 and equal t_i.
"""

import torch
from torch import Tensor

from fedbench.algorithms._features import (
    ClassStatistics,
    class_statistics,
    features_of_samples,
    require_features,
    require_labels,
)
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
from fedbench.core.options import Count, NonNegative, NonNegativeInt
from fedbench.engine.optim import SGD


class FedAS(Algorithm):
    """FedAS.  w: server model; theta_i: model of client i; t_i: its weight in w; mu_c: mean of its features of class c.

    Args:
        align_lr: Learning rate of the alignment, >= 0.
        align_epochs: Passes of the alignment.
        align_batch_size: Batch size of the alignment.
        fisher_batch_size: Batch size of the gradients in t_i.  None: local.batch_size.

    State:
        w: Server model, [P].
        theta: Client models as last trained, [N, P].
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        align_lr: NonNegative = 0.01,
        align_epochs: NonNegativeInt = 1,
        align_batch_size: Count = 16,
        fisher_batch_size: Count | None = None,
    ):
        self.align_lr, self.align_epochs, self.align_batch_size = align_lr, align_epochs, align_batch_size
        self.fisher_batch_size = fisher_batch_size

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the clients' models theta_i [N, P], stored by `rows`, to the initial model."""
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # [N, P]; a row equals the default until it is set
        self.base, self.num_classes = model.without("head"), federation.num_classes  # columns outside the head; C

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedAS: clients align the base of w, train, and the server averages with the weights t_i.

        Aligning trains the base, all columns except the head, so that its features match those of the client's last
        model.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        theta = cohort.train(self.aligned(cohort, w, self.theta[cohort.ids])).theta  # [K, P]
        up = cohort.upload(
            theta=theta,
            t=self.trace(cohort, theta),  # sum of the squared norms of the client's gradients
            relative_to={"theta": "w"},  # theta - w is sent, and the server adds w
            previous={"t": None},  # None: t is sent as it is
            uncompressed=["t"],
        )
        t = up.t.clamp_min(1e-12)  # noise may make it negative  [K]
        self.w = cohort.mean(up.theta, weights=t / t.sum(), updates="w")  # or the option server's step to it
        self.theta[cohort.ids] = theta

    def aligned(self, cohort: Cohort, w: Tensor, theta: Tensor) -> Tensor:
        """Align the base of the received model: train it until its features match those of each client's model.

        Args:
            cohort: The clients.
            w: The received model.  # [P]
            theta: The clients' models theta_i.  # [K, P]

        Returns:
            The clients' models: the aligned base, with the other columns of theta_i.  # [K, P]
        """

        def loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            """Return the sum over classes of the mean squared distance of features to the class mean mu_c.  # [k]

            rows have the trained base u.  s.state.mu are the means under the client's last model, of the classes in
            s.state.has_mean.
            """
            z = s.features(rows, batch)  # features under the base u  [k, B, F]
            client = torch.arange(s.k, device=z.device)[:, None]
            distance = (z - s.state.mu[client, batch.y]).square().mean(2)  # [k, B]
            classes = torch.arange(self.num_classes, device=z.device)
            # samples of classes without a mean, and padding, have zeros only
            one_hot = (batch.y[..., None] == classes) & batch.real[..., None] & s.state.has_mean[:, None]  # [k, B, C]
            share = (one_hot / one_hot.sum(1, keepdim=True).clamp_min(1)).sum(2)  # 1 / samples of its class  [k, B]
            return (share * distance).sum(1)

        how = LocalTraining(
            epochs=self.align_epochs,
            batch_size=self.align_batch_size,
            optimizer=SGD(self.align_lr),
            key="align",
            # throughput_weight=0: images/s count each sample once; key: of the random batches
            throughput_weight=0,
        )
        old = self.statistics(cohort, theta)  # class counts and class means of features under the client's last model
        aligned = cohort.train(w, loss=loss, columns=self.base, how=how, mu=old.means, has_mean=old.counts > 0).theta
        return self.base.put(theta, self.base.take(aligned))  # replaces the base of theta_i

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        """Return the counts [K, C] and mean features [K, C, F] of each client's training samples, by class.

        theta [K, P] are the clients' models.  The mean of a class without samples is 0.
        """
        return class_statistics(*features_of_samples(cohort, theta), self.num_classes)

    def trace(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return the weight t_i of each client, the sum over batches of the squared norm of its gradient.

        Args:
            cohort: The clients.
            theta: Their trained models, at which the gradients are computed.  # [K, P]

        Returns:
            The weights t_i, not normalized.  # [K]
        """

        def step(s: Step, batch: Batch) -> None:  # only adds up t_i; theta_i does not move
            s.state.t.add_(s.grad(batch).square().sum(1))

        how = LocalTraining(
            # throughput_weight=0: images/s count each sample once; key: of the random batches
            epochs=1,
            batch_size=self.fisher_batch_size,
            key="trace",
            throughput_weight=0,
            uploaded=False,  # privacy does not clip these gradients
        )
        return cohort.train(theta, step=step, how=how, t=theta.new_zeros(len(cohort))).t

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the clients' own models as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
