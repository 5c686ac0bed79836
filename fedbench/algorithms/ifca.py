"""IFCA: clustered federated learning, where each client selects the cluster model with its lowest training loss.

Ghosh et al., NeurIPS 2020, Algorithm 1 (model averaging).  The server sends theta_1 to theta_M.  Client i selects
k_i = argmin_k f_i(theta_k) over its training samples, trains theta_{k_i} and uploads it with k_i.
theta_k <- the mean of the uploads of clients with k_i = k, unchanged if there are none.
Clients deploy the model that has the lowest loss on their training samples after aggregation.
shared_body=true is the paper's weight sharing: all columns except the head are averaged over all clients.
Departs from the paper: means are weighted by samples (client_weights=uniform: as in the released code); ties select the
lowest k.
Departs from the released code: at evaluation clients also select by training loss.  There, the reported model has the
lowest loss on the client's test samples.
Reduces to: FedAvg at clusters = 1.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore
from fedbench.core.options import Count, require


class IFCA(Algorithm):
    """IFCA.  theta_1 to theta_M: models of M clusters (the option clusters); body: columns outside the head.

    Args:
        clusters: Number M of cluster models.
        shared_body: Whether all columns except the head are averaged over all clients.

    State:
        theta: Cluster models, [M, P], with independent random initializations.
    """

    def __init__(self, clusters: Count = 2, shared_body: bool = False):
        self.clusters, self.shared_body = clusters, shared_body
        self.requires, self.has_base = ("head",) if shared_body else (), shared_body

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: M cluster models, initialized independently; with shared_body, only their heads differ.

        Raise ConfigError if two of them are equal.
        """
        first = model.init_row()[None]  # the model's own initial values  [1, P]
        # "ifca": key of their random numbers  [M - 1, P]
        others = model.init_rows(self.clusters - 1, "ifca") if self.clusters > 1 else first[:0]
        self.theta = torch.cat([first, others])  # [M, P]
        if self.shared_body:
            body = self.body = model.without("head")  # columns outside the head, which are equal at first
            self.theta = body.put(self.theta, body.take(first).expand(self.clusters, -1))
        require(
            not any(torch.equal(a, b) for a, b in combinations(self.theta, 2)),
            f"algorithm.clusters={self.clusters}: this model always has the same initial parameters, so clusters would "
            "never separate. Choose a model that is initialized at random (without pretrained weights), or set "
            "algorithm.clusters=1",
        )

    def round(self, cohort: Cohort) -> None:
        """Run one round of IFCA: each client trains its best cluster model, and the server averages by cluster."""
        theta = cohort.broadcast(theta=self.theta).theta  # [M, P]
        chosen = self.nearest(cohort, theta)  # k_i  [K]
        out = cohort.train(theta[chosen])
        # k_i is uploaded as a vector with one 1, as it is (None); argmax, because privacy noise may change it
        vectors = one_hot(chosen, self.clusters).to(theta)  # [K, M]
        # choices as the server receives them
        received = cohort.upload(k=vectors, previous={"k": None}, uncompressed=["k"]).k.argmax(1)  # [K]
        change = out.theta - theta[chosen]  # [K, P]
        change = cohort.upload(change=change, relative_to={"change": None}).change  # change is already a difference
        # `groups`: which clients belong to each cluster
        step = cohort.mean(change, groups=one_hot(received, self.clusters).T)  # [M, P], 0 for a cluster without clients
        if self.shared_body:  # all clusters have the same columns outside the head
            step = self.body.put(step, cohort.mean(self.body.take(change)).expand(self.clusters, -1))
        self.theta = self.theta + step

    def nearest(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """Return for each client the index of the cluster model with the lowest loss on its training samples.

        Args:
            cohort: The clients.
            theta: The cluster models.  # [M, P]

        Returns:
            Indices k_i from 0 to M - 1.  # [K]
        """
        if self.clusters == 1:
            return torch.zeros_like(cohort.index)
        return cohort.loss(theta.expand(len(cohort), -1, -1)).argmin(1)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: for each client, the cluster model that now fits best.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        theta = cohort.broadcast(theta=self.theta).theta
        return theta[self.nearest(cohort, theta)]

    def initial_row_for_new_clients(self, cohorts: Sequence[Cohort]) -> Tensor:
        """Return the model of new clients without samples: the unweighted mean of all M cluster models.  # [P]

        `cohorts`, the training clients, is not used.
        """
        return self.theta.mean(0)

    def initial_rows_for_new_clients(self, new_clients: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """Return for each new client the cluster model with the lowest loss on its training samples.

        Args:
            new_clients: n clients that took no part in training.
            cohorts: Unused.

        Returns:
            The models.  # [n, P]
        """
        return self.theta[self.nearest(new_clients, self.theta)]
