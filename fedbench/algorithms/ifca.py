"""IFCA: the server keeps several models, and every client trains the one that suits it best.

Ghosh et al., NeurIPS 2020, Algorithm 1 (model averaging).  The server sends theta_1 to theta_M; client i picks
k_i = argmin_k f_i(theta_k) over its training samples, trains theta_{k_i} and sends it back with k_i;
theta_k <- the mean of the uploads of clients with k_i = k, unchanged if there are none.
Departs from the paper: means are weighted by samples (client_weights=uniform: as the released code's); ties go to the
lowest k.
Departs from the released code: clients choose by training samples at evaluation as well, where its scores are those of
the model with the lowest loss on each client's test samples.
shared_body is their weight sharing: all columns but the head are averaged over all clients.
Clients deploy the model that has the lowest loss on their training samples after aggregation.
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
    """clusters: M; shared_body: above.

    State: theta [M, P], the first one the model's own initialization and the others independent ones.
    """

    def __init__(self, clusters: Count = 2, shared_body: bool = False):
        self.clusters, self.shared_body = clusters, shared_body
        self.requires, self.has_base = ("head",) if shared_body else (), shared_body

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """M initializations, of which with a shared body only the heads differ."""
        first = model.init_row()[None]  # [1, P]
        others = model.init_rows(self.clusters - 1, "ifca") if self.clusters > 1 else first[:0]
        self.theta = torch.cat([first, others])  # [M, P]
        if self.shared_body:
            body = self.body = model.without("head")
            self.theta = body.put(self.theta, body.take(first).expand(self.clusters, -1))
        require(
            not any(torch.equal(a, b) for a, b in combinations(self.theta, 2)),
            f"algorithm.clusters={self.clusters}: this model is always initialized to the same numbers, so "
            "that clusters would never separate; initialize it at random, or set algorithm.clusters=1",
        )

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        theta = cohort.broadcast(theta=self.theta).theta  # [M, P]
        pick = self.nearest(cohort, theta)  # k_i  [K]
        out = cohort.train(theta[pick])
        chosen = one_hot(pick, self.clusters).to(theta)  # [K, M]
        choice = cohort.upload(k=chosen, replaces={"k": None}, uncompressed=["k"]).k.argmax(1)  # [K]
        change = out.theta - theta[pick]  # [K, P]
        change = cohort.upload(change=change, relative_to={"change": None}).change
        step = cohort.mean(change, groups=one_hot(choice, self.clusters).T)  # [M, P], 0 for a k of nobody
        if self.shared_body:
            step = self.body.put(step, cohort.mean(self.body.take(change)).expand(self.clusters, -1))
        self.theta = self.theta + step

    def nearest(self, cohort: Cohort, theta: Tensor) -> Tensor:
        """k_i = argmin_k f_i(theta_k) on the training samples.  # [K]"""
        if self.clusters == 1:
            return torch.zeros_like(cohort.index)
        return cohort.loss(theta.expand(len(cohort), -1, -1)).argmin(1)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """theta_{k_i}, picked anew."""
        theta = cohort.broadcast(theta=self.theta).theta
        return theta[self.nearest(cohort, theta)]

    def newcomer_row(self, cohorts: Sequence[Cohort]) -> Tensor:
        """The mean of the models, for one that cannot pick."""
        return self.theta.mean(0)

    def newcomer_rows(self, newcomers: Cohort, cohorts: Sequence[Cohort]) -> Tensor:
        """theta_k with the least loss on a new client's own samples.  # [n, P]"""
        return self.theta[self.nearest(newcomers, self.theta)]
