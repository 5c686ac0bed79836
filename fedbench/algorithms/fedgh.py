"""FedGH: the server trains the shared head on class means of the clients' features; bases are personal.

Yi et al., ACM MM 2023, Algorithm 1.  Client i trains [u_i, h] from the received head h, and uploads the mean of its
features of each of its classes.  The server descends the cross-entropy of h on these means, in one pass of batches:

    h <- h - eta_s grad CE(h(mean_ic), c)

Deployed: u_i with the newest h.
Departs from the paper: nowhere.  In PFLlib the server's head is also that of client 0, whose training moves it.
An upload shows which classes a client has.
Reduces to: LG-FedAvg (update="joint") with a fixed head, for eta_s = 0.
"""

from collections.abc import Collection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.algorithms._features import (
    ClassStatistics,
    class_statistics,
    features_of_samples,
    require_features,
    require_labels,
)
from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, Optimizer, RowStore
from fedbench.core.options import Positive, require


class FedGH(Algorithm):
    """FedGH.  h: shared head, which the server trains; theta_i: model of client i, whose base is personal.

    Args:
        head_lr: Learning rate eta_s of the head at the server.  None: that of the clients.

    State:
        h: Shared head, [|head|].
        theta: Client models as last trained, [N, P].
    """

    requires = ("head",)
    has_base = True

    def __init__(self, head_lr: Positive | None = None):
        self.head_lr = head_lr

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """Check as `Algorithm.check_settings`; also raise ConfigError for head_lr=None if optimizer.lr is a list.

        The list has one learning rate per client, but the server's head needs one rate.  The number of clients and
        `groups`, the names of the model's sets of parameters, are passed on.
        """
        super().check_settings(num_clients, groups, optimizer)
        require(
            self.head_lr is not None or not isinstance(optimizer.lr, list),
            "algorithm.head_lr=null uses the clients' learning rate for the server's head, but optimizer.lr lists one "
            "value per client: set algorithm.head_lr to a number",
        )

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless each sample has one class, and the model has a linear head."""
        super().check(federation, model, optimizer)
        require_labels(federation, self._name)
        require_features(model, self._name)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's head h [|head|] and the clients' models theta_i [N, P] to the initial model's.

        `rows` stores theta_i.
        """
        self.head = model.columns["head"]  # columns of the head in a row
        self.num_classes = federation.num_classes
        w = model.init_row()
        self.h = self.head.take(w).clone()  # [|h|]
        self.theta = rows("theta", default=w)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedGH: clients train and upload class means; the server trains the head h on these."""
        start = self.head.put(self.theta[cohort.ids], cohort.broadcast(h=self.h).h)  # [K, P]
        # uploaded=False: the trained parameters stay with the clients
        theta = cohort.train(start, how=LocalTraining(uploaded=False)).theta
        self.theta[cohort.ids] = theta
        statistics = self.statistics(cohort, theta)  # counts and means of each class's features
        up = cohort.upload(
            means=statistics.means,
            has=(statistics.counts > 0).float(),  # whether client i has samples of class c  [K, C]
            previous={"means": None, "has": None},  # None: sent as they are, because the server has no version
            uncompressed=["has"],
        )
        has_prototype = up.has > 0.5  # privacy noise may change the received 0 and 1  [K, C] bool
        classes = torch.arange(self.num_classes, device=cohort.device).expand(len(cohort), -1)
        order = self.order(cohort)[has_prototype].argsort()  # a random order of the class means
        self.h = self.train_head(cohort, up.means[has_prototype][order], classes[has_prototype][order])

    def statistics(self, cohort: Cohort, theta: Tensor) -> ClassStatistics:
        """Return the counts [K, C] and mean features [K, C, F] of each client's training samples, by class.

        theta [K, P] are the clients' models.  The mean of a class without samples is 0.
        """
        return class_statistics(*features_of_samples(cohort, theta), self.num_classes)

    def train_head(self, cohort: Cohort, means: Tensor, classes: Tensor) -> Tensor:
        """Train the head h at the server by SGD on the cross-entropy of the class means, for one pass.

        Args:
            cohort: The clients.
            means: Class means of all clients, in the order of the pass.  # [m, F]
            classes: Their classes.  # [m]

        Returns:
            The trained head.  # [|h|]
        """
        # row: any model, of which only the head is used, with the values h; lr: by default that of the clients
        row, lr = cohort.model.init_row(), cohort.rate() if self.head_lr is None else self.head_lr
        h, size = self.h, int(np.max(cohort.engine.batch_size))  # size of a batch: the largest one of the clients
        for z, c in zip(means.split(size), classes.split(size)):
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                loss = F.cross_entropy(cohort.model.head(self.head.put(row, leaf), z), c)
                (gradient,) = torch.autograd.grad(loss, leaf)
            h = h - lr * gradient
        return h

    def order(self, cohort: Cohort) -> Tensor:
        """Return a uniform random number for each client and class; the server sorts their class means by them.

        # [K, C]
        """
        return cohort.random("class means").uniform(self.num_classes)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: each client's base with the newest server head h.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.head.put(self.theta[cohort.ids], cohort.broadcast(h=self.h).h)
