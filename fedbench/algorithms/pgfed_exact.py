"""PGFed-exact: PGFed's objective with the exact risks of the other clients, as a reference for small experiments.

Luo et al., ICCV 2023, the explicit objective of their toy experiment:
F_i = f_i(theta_i) + mu/(N - 1) sum_{j != i} f_j(theta_i), where f_j is over all training samples of client j at every
local step.
Reduces to: FedAvg-local at mu = 0.
Limits: it is not federated.  Clients read each other's samples, which the communication cost does not include.  Every
local step needs a pass over the whole data set.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.inputs import map_inputs
from fedbench.core.options import NonNegative, require
from fedbench.engine.per_client import per_client

LIMIT = 50_000  # maximum of training samples times clients per round


class PGFedExact(FedAvg):
    """PGFed-exact.  w: server model; theta_i: model of client i; mu: weight of the other clients' mean risk.

    Args:
        mu: Weight of the other clients' risks, >= 0.  A list sets one value per client.

    State:
        w: Server model, [P].
        theta: Client models as last trained, [N, P].
    """

    bypasses_upload = "algorithm=pgfed_exact lets clients compute with each other's samples"
    reads_all_samples = bypasses_upload

    def __init__(self, mu: NonNegative | list[NonNegative] = 0.1):
        super().__init__(deploy="local")
        self.mu = per_client(mu)

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the federation is small, and has at least two clients with the same classes.

        Small: at most LIMIT training samples of all clients times clients per round.
        """
        super().check(federation, model, optimizer)
        # samples that every local step of a round passes
        work = int(federation.num_samples.sum()) * federation.cohort_size
        require(
            work <= LIMIT,
            f"algorithm=pgfed_exact passes over all clients' data at every local step and is for small federations: "
            f"training samples times clients per round must be at most {LIMIT:,}, and their product is {work:,}. Use "
            "algorithm=pgfed, or a smaller data set",
        )
        require(
            federation.num_clients > 1,
            f"algorithm=pgfed_exact averages the risks of other clients: it needs at least two clients, and there is "
            f"{federation.num_clients}. Raise partition.num_clients",
        )
        require(
            federation.class_mask is None,
            "algorithm=pgfed_exact computes each client's model on all clients' samples: it needs clients that share "
            "their classes, and here each client has classes of its own. Use algorithm=pgfed, or another data set",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w to the initial model; list all training samples with their clients and weights.

        The weight of client j's sample in another client's objective is 1 / (n_j (N - 1)), for n_j samples of j.
        """
        super().setup(federation, model, rows)  # sets self.w
        train = federation.splits["train"]
        self.samples = train.indices  # positions of all clients' training samples in the data set  [n] on the host
        # 1 / (n_j (N - 1)): a mean over the n_j samples of client j, then over the other clients  [N]
        weight = 1 / np.maximum(train.sizes, 1) / (federation.num_clients - 1)
        self.owner, self.weight = train.owners(), weight[train.owners()]  # [n] on the host

    def round(self, cohort: Cohort) -> None:
        """Run one round: clients train from w on their own and all other samples, and the server averages."""
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = self.train(cohort, w) if self.mu else cohort.train(w)
        self.theta[cohort.ids] = out.theta
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]; theta - w is sent; w is added again
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def train(self, cohort: Cohort, w: Tensor) -> SimpleNamespace:
        """Train from w [P] for the local epochs, with all clients' samples in every step.

        Returns:
            The output of `cohort.train`.
        """
        index = torch.from_numpy(self.samples).to(cohort.device)  # positions of all training samples  [n]
        x, y = cohort.federation.gather(index)  # [n, ...], [n, ...]
        # owner: the client of each sample; weight: of each sample in other clients' risks, here 0 for its owner  [K, n]
        others = torch.from_numpy((self.owner != cohort.ids[:, None]) * self.weight).to(w)

        def step(s: Step, batch: Batch) -> None:
            """Take one local step along the gradient of the client's batch plus that of all other clients' samples.

            x and y are the training samples of all clients, and index their positions in the data set.
            """
            k = len(s.theta)  # clients of this step
            counts = np.full(k, len(index))  # every client gets all n training samples
            expanded_x = map_inputs(lambda t: t.expand(k, *t.shape), x)  # [k, n, ...], without copies
            # all training samples as one batch of each client; others: their weights in its loss, mu and 0 for its own
            # shared=True: all clients have the same samples
            everybody = Batch(expanded_x, y.expand(k, *y.shape), s.state.others, counts, shared=True)
            g = s.grad(batch)  # [k, P]
            s.descend(g.add_(s.grad(everybody, rows=s.theta.clone())))  # a copy, so theta's BatchNorm buffers stay

        # others becomes s.state.others; cohort.value: one number, or [K, 1] if mu is a list
        return cohort.train(w, step=step, others=cohort.value(self.mu) * others)
