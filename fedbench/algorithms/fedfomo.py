"""FedFomo: each client mixes the models of those that help it, by their loss on samples it holds out.

Zhang et al., ICLR 2021.  For the models theta_j that client i downloads, with L the loss on its held-out samples,
omega_j = max(L(ref_i) - L(theta_j), 0) / (||theta_j - ref_i|| + 1e-5), then divided by their sum; where that is
positive theta_i <- sum_j omega_j theta_j, the paper's theta_i + sum_j omega_j (theta_j - theta_i).  Clients upload
omega; the server keeps Pref <- Pref + omega, from I, and sends client i the first M by Pref[i] among last round's
uploads.
Departs from the paper, as the code behind the PFL benchmarks does: ref_i is what i mixed the last time it was
sampled, before its training (reference="trained": the paper's theta_i); no exploration (epsilon).  Ties of Pref are
broken by lot; the held-out samples are a random share.
Reduces to: Local on the kept samples at models = 0.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Rows, RowStore
from fedbench.core.options import Natural, Probability, Share
from fedbench.core.rng import RowRandom
from fedbench.engine.training import LocalTraining


class FedFomo(Algorithm):
    """models: M; held_out: share of the training samples that only L sees; epsilon: chance that a download is drawn
    from all the others rather than by Pref.

    State: theta [N, P], what client i last trained; ref [N, P] (reference="aggregated"); pref [N, N], Pref - I;
    uploaded [N, P], theta as the server saw it, where that is something else; of the last cohort last [K', P], its
    uploads, and prev [K'].
    """

    def __init__(
        self,
        models: Natural = 8,
        held_out: Share = 0.2,
        reference: Literal["aggregated", "trained"] = "aggregated",
        epsilon: Probability = 0.0,
    ):
        self.models, self.held_out, self.reference, self.epsilon = models, held_out, reference, epsilon
        self.last: Any = None  # nothing uploaded yet
        self.uploaded: Rows | None = None  # until a message is made private or compressed

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All clients start from one model; Pref = I; every client holds samples out."""
        w, self.rows = model.init_row(), rows
        self.theta = rows("theta", default=w)  # lazy [N, P]
        self.ref = rows("ref", default=w) if self.reference == "aggregated" else self.theta
        self.pref = rows("pref", default=torch.zeros(federation.num_clients).to(w))  # lazy [N, N]
        federation.hold_out(self.held_out)  # splits "kept" and "held"

    def round(self, cohort: Cohort) -> None:
        """Mix what was downloaded, train, upload; in the first round there is nothing to mix."""
        theta = self.theta[cohort.ids]  # [K, P]
        if self.last is not None and self.models:
            theta = self.mixed(cohort, theta, self.ref[cohort.ids])
        out = cohort.train(theta, how=LocalTraining(split="kept"))
        if self.reference == "aggregated":
            self.ref[cohort.ids] = theta
        self.theta[cohort.ids] = out.theta
        up = cohort.upload(theta=out.theta, replaces={"theta": self.known(cohort)})
        if self.uploaded is not None:
            self.uploaded[cohort.ids] = up.theta
        self.last, self.prev = up.theta, cohort.index

    def known(self, cohort: Cohort) -> Tensor:
        """theta_i as the server has it: what client i uploaded last, or the initial one.  # [K, P]"""
        if cohort.is_lossless:
            return self.theta[cohort.ids]
        if self.uploaded is None:
            self.uploaded = self.rows("uploaded", default=self.theta.default)
        return self.uploaded[cohort.ids]

    def mixed(self, cohort: Cohort, theta: Tensor, ref: Tensor) -> Tensor:
        """sum_j omega_j theta_j, or theta_i [K, P] of a client whom no model helps; Pref <- Pref + omega.  # [K, P]"""
        chosen = self.choose(cohort)  # [K, M]
        is_chosen = torch.zeros(len(cohort), len(self.prev), dtype=torch.bool, device=chosen.device)  # [K, K']
        others = cohort.fetch(is_chosen.scatter(1, chosen, True), theta=self.last).theta[chosen]  # theta_j  [K, M, P]
        omega = self.weights(cohort, others, ref)  # [K, M]
        total = omega.sum(1, keepdim=True)  # [K, 1]
        omega = torch.where(total > 0, omega / total, 0)
        uploaded = cohort.upload(omega=omega, replaces={"omega": None}, uncompressed=["omega"]).omega
        self.pref[cohort.ids] = self.pref[cohort.ids].scatter_add(1, self.prev[chosen], uploaded)
        mixture = (omega[:, None] @ others)[:, 0]  # [K, P]
        return torch.where(total > 0, mixture, theta)

    def weights(self, cohort: Cohort, others: Tensor, ref: Tensor) -> Tensor:
        """omega_j = max(L(ref_i) - L(theta_j), 0) / (||theta_j - ref_i|| + 1e-5).  others [K, M, P]  # [K, M]"""
        gain = cohort.loss(ref, "held")[:, None] - cohort.loss(others, "held")  # [K, M]
        trained = cohort.model.trained
        ref = trained.take(ref)
        distance = torch.stack([(trained.take(theta_j) - ref).norm(dim=1) for theta_j in others.unbind(1)], 1)
        return gain.clamp_min(0) / (distance + 1e-5)

    def choose(self, cohort: Cohort) -> Tensor:
        """For each client the positions, in the last cohort, of the M models that it downloads.  # [K, M]"""
        draws, own = cohort.random("fedfomo"), cohort.index[:, None] == self.prev  # [i = j]  [K, K']
        order = by_preference(self.pref[cohort.ids][:, self.prev] + own, draws)  # Pref[i, j] = self.pref + [i = j]
        M = min(self.models, len(self.prev))
        return (explored(order, self.epsilon, M, draws) if self.epsilon else order)[:, :M]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """theta_i as last trained."""
        return self.theta[cohort.ids]


def by_preference(pref: Tensor, draws: RowRandom) -> Tensor:
    """Positions of the largest of pref [K, K'] first, equal ones in an order by lot.  # [K, K']"""
    lot = draws.uniform(pref.shape[1]).argsort(1)  # shuffled, then sorted stably: equal ones stay shuffled
    best = pref.gather(1, lot).argsort(dim=1, descending=True, stable=True)
    return lot.gather(1, best)  # back to positions


def explored(order: Tensor, epsilon: float, M: int, draws: RowRandom) -> Tensor:
    """The order [K, K'] with exploration: each of the M downloads is drawn by lot with probability epsilon.

    Where m of the M are not, the first m of the order stay where they are, and all others follow by lot.
    """
    size = order.shape[1]
    m = (draws.uniform(M) >= epsilon).sum(1, keepdim=True)  # downloads by preference  [K, 1]
    place = torch.arange(size, device=order.device)
    by_lot = size + draws.uniform(size)  # sort keys beyond every place  [K, K']
    return order.gather(1, torch.where(place < m, place, by_lot).argsort(1))
