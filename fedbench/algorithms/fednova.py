"""FedNova: updates are normalized by the number of local steps before they are averaged.

Wang et al., NeurIPS 2020.  Client i with T_i steps uploads its change and the norm a_i of its accumulation vector:

    a_i = T_i                                              (plain SGD)
    a_i = sum over steps of c_t,  c_t = rho c_{t-1} + 1    (momentum rho)
    a_i <- a_i (1 - eta mu) + 1 at each step               (proximal term mu)
    tau_eff = sum p_i a_i,  with mu: sum p_i T_i
    G = tau_eff sum p_i (w - theta_i) / a_i
    w <- w - G,   or with server momentum gamma:  v <- gamma v + G / eta,  w <- w - eta v

Departs from the paper: with momentum and mu, the proximal term also enters the momentum buffer and a_i follows the
released code, which applies both recursions in turn.  Running statistics of batch norm are averaged without a_i.
Reduces to: FedAvg if all clients take equally many steps.
Limits: SGD with buffers reset in each round, without weight decay, dampening or Nesterov momentum.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Cohort, Federation, FlatModel, Optimizer, RowStore
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import NonNegative, UnitInterval, require
from fedbench.engine.optim import SGD


class FedNova(FedAvg):
    """FedNova.  w: server model; v: server momentum; mu: weight of the proximal term mu/2 |theta - w|^2.

    Args:
        mu: Weight of the proximal term mu/2 |theta - w|^2, >= 0.
        server_momentum: Momentum gamma of the server, in [0, 1).

    State:
        w: Server model, [P].  v: Server momentum, [P].
    """

    def __init__(self, mu: NonNegative = 0.0, server_momentum: UnitInterval = 0.0):
        super().__init__()
        self.mu, self.server_momentum = mu, server_momentum

    def check_settings(self, num_clients: int | None, groups: Collection[str], optimizer: Optimizer) -> None:
        """Raise ConfigError unless the optimizer is SGD without options that change how it sums a round's gradients.

        Args:
            num_clients: Number of training clients; None if only the data set determines it.
            groups: Names of the model's sets of parameters (columns of a row), such as "head".
            optimizer: The local optimizer.
        """
        super().check_settings(num_clients, groups, optimizer)
        is_sgd = isinstance(optimizer, SGD)
        require(
            is_sgd and not optimizer.nesterov and not optimizer.weight_decay,
            "algorithm=fednova divides updates by what SGD accumulates in a round, which is known only for plain SGD "
            "or SGD with momentum: set optimizer=sgd optimizer.nesterov=false optimizer.weight_decay=0",
        )
        # buffers: names of the optimizer's state, such as its momentum; empty without
        require(
            not optimizer.buffers or optimizer.reset == "round",
            f"algorithm=fednova needs momentum that starts at 0 in each round, but optimizer.reset={optimizer.reset} "
            "keeps it: set optimizer.reset=round",
        )
        require(
            not self.server_momentum or not isinstance(optimizer.lr, list),
            f"algorithm.server_momentum={self.server_momentum:g} divides by the learning rate, but optimizer.lr lists "
            "one value per client: set one optimizer.lr for all clients, or algorithm.server_momentum=0",
        )
        self.rho = optimizer.momentum if is_sgd else 0.0  # the paper's name for the momentum of local SGD

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w to the initial model, and the server momentum v to 0.  # [P] each"""
        super().setup(federation, model, rows)  # sets self.w
        self.v = torch.zeros_like(self.w)  # [P]

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedNova: clients train from w, and the server averages their normalized changes.

        A change is divided by a_i, the effective number of local steps, and the mean multiplied by tau_eff.  tau_eff is
        the mean of a_i, or with mu > 0 the mean number T of steps.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = cohort.train(w, extra_grad=(lambda s: self.mu * (s.theta - w)) if self.mu else None)
        a = self.accumulation(out.steps, out.lr)  # [K]
        counts = {"a": a, "T": out.steps} if self.mu else {"a": a}  # [K] each
        up = cohort.upload(
            theta=out.theta,
            relative_to={"theta": "w"},  # theta - w is sent, and the server adds w
            previous=dict.fromkeys(counts),  # None for each: a and T are sent as they are
            uncompressed=[*counts],
            **counts,  # type: ignore[arg-type]
        )
        tau_eff = cohort.mean(up.T if self.mu else up.a)  # weighted by n_i  []
        normalized = (self.w - up.theta) * (tau_eff / up.a.clamp_min(1e-12))[:, None]  # [K, P], 0 without steps
        G = cohort.mean(normalized)  # [P]
        if self.server_momentum:  # cohort.rate(): learning rate of this round
            self.v = self.server_momentum * self.v + G / cohort.rate()
            G = cohort.rate() * self.v
        statistics = cohort.model.trained.rest(cohort.model.size)  # columns of running statistics
        # w - G; running statistics get their mean
        self.w = statistics.put(self.w - G, statistics.take(cohort.mean(up.theta)))

    def accumulation(self, steps: Tensor, lr: float | Tensor) -> Tensor:
        """Return a_i, the effective number of local steps: the sum of the weights of a client's gradients.

        With momentum rho the gradient of a step counts several times; with mu, older ones decay.

        Args:
            steps: Numbers T_i of local steps.  # [K]
            lr: Learning rate eta, a number or one per client.  # [K, 1]

        Returns:
            a_i.  # [K]
        """
        T = steps.long().cpu().numpy()
        eta = np.broadcast_to(torch.as_tensor(lr).double().cpu().numpy().reshape(-1), T.shape)
        a, c = np.zeros(len(T)), np.zeros(len(T))
        for t in range(int(T.max(initial=0))):
            c = self.rho * c + 1  # c_t, the accumulated momentum; 1 without momentum
            # without mu: a + c_t; with mu: (1 - eta mu) a + 1; with both: (1 - eta mu) (a + c_t) + 1
            after = a + c if self.rho or not self.mu else a
            if self.mu:
                after = after * (1 - eta * self.mu) + 1
            a = np.where(t < T, after, a)  # clients that took fewer than t + 1 steps keep theirs
        return torch.from_numpy(a).to(steps)
