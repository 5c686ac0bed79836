"""SCAFFOLD: control variates cancel the drift of local SGD.

Karimireddy et al., ICML 2020, Algorithm 1, option II for c_i.
Departs from the paper: nowhere (weights="samples" is an option).  BatchNorm buffers are averaged like parameters.
Reduces to: uniformly weighted FedAvg in round 1.
Limits: plain SGD only.  With momentum, weight decay, clipping or Adam the formula of c_i would be wrong.
"""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Optimizer, RowStore
from fedbench.core.options import Positive, require


class Scaffold(Algorithm):
    """SCAFFOLD.  x: server model; c_i: control variate of client i; c: control variate of the server.

    Args:
        server_lr: Global step size eta_g, > 0.
        weights: How the server averages the clients' model updates: "uniform", as in the paper, or "samples".

    State:
        x: Server model, [P].
        c: Server control variate, [P].
        c_i: Client control variates, [N, P].
    """

    supports_client_ranks = True

    def __init__(self, server_lr: Positive = 1.0, weights: Literal["uniform", "samples"] = "uniform"):
        self.server_lr = server_lr
        self.weights: Literal["uniform", "samples"] = weights

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """Raise ConfigError unless the optimizer is plain SGD: no momentum, weight decay or clipping.

        Args:
            num_clients: Number of training clients; None if only the data set determines it.
            groups: Names of the model's sets of parameters (columns of a row), such as "head".
            optimizer: The local optimizer.
        """
        super().check_settings(num_clients, groups, optimizer)
        require(
            getattr(optimizer, "is_plain_sgd", False),
            "algorithm=scaffold needs plain SGD, because its control variates are derived from theta - lr * gradient: "
            "set optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0 optimizer.clip=null",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model x [P] to the initial model, and the control variates c [P] and c_i [N, P] to 0.

        `rows` stores c_i.
        """
        self.x = model.init_row()  # [P]
        self.c = torch.zeros_like(self.x)  # [P]
        self.c_i = rows("c_i", default=self.c)  # [N, P]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of SCAFFOLD: clients train with corrected gradients; the server updates x and c."""
        c_i = self.c_i[cohort.ids]  # [K, P]
        server = cohort.broadcast(x=self.x, c=self.c)
        out = cohort.train(server.x, c_i=c_i, extra_grad=lambda s: server.c - s.state.c_i)
        total_lr = out.steps[:, None] * out.lr  # [K, 1]; if 0, there is no gradient estimate and c_i stays
        new = torch.where(total_lr > 0, c_i - server.c + (server.x - out.theta) / total_lr, c_i)  # [K, P]
        # None: dx and dc are already differences
        up = cohort.upload(dx=out.theta - server.x, dc=new - c_i, relative_to={"dx": None, "dc": None})  # [K, P] each
        self.c_i[cohort.ids] = new
        # step of size eta_g along the mean change; weights: equal, or by samples
        self.x = self.x + self.server_lr * cohort.mean(up.dx, weights=self.weights)
        self.c = self.c + cohort.sum(up.dc) / cohort.num_clients  # mean over all N clients

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return what the cohort deploys, the server model x for every client.  # [P]

        `final`, whether the last round is over, changes nothing.
        """
        return cohort.broadcast(x=self.x).x

    def global_row(self) -> Tensor:
        """Return the server model x.  # [P]"""
        return self.x
