"""FedFomo: first-order model optimization; each client mixes the models that lower its loss on held-out samples.

Zhang et al., ICLR 2021.  Client i downloads models theta_j.  With L its loss on its held-out samples,
omega_j = max(L(ref_i) - L(theta_j), 0) / (||theta_j - ref_i|| + 1e-5), then divided by their sum.  If the sum is
positive, theta_i <- sum_j omega_j theta_j, which is the paper's theta_i + sum_j omega_j (theta_j - theta_i).  Clients
upload omega.  The server updates Pref <- Pref + omega, starting from I, and sends client i the M models of the last
round with the largest Pref[i].
Departs from the paper, as the code behind the PFL benchmarks does: ref_i is the mixture of client i's previous round,
before training (reference="trained": theta_i, as in the paper); no exploration by default (epsilon).  Ties of Pref are
broken at random; held-out samples are random.
Reduces to: Local without the held-out samples at models = 0.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Rows, RowStore
from fedbench.core.options import NonNegativeInt, Probability, UnitInterval
from fedbench.core.rng import RowRandom
from fedbench.engine.training import LocalTraining


class FedFomo(Algorithm):
    """FedFomo.  The K clients i of a round download M of the models theta_j of the K' clients j of the last cohort.

    Args:
        models: Number M of models that a client downloads in a round.
        held_out: Fraction of the training samples that is held out for L, in [0, 1).
        reference: ref_i: "aggregated", the mixture before training, or "trained", theta_i.
        epsilon: Probability that a download is selected at random instead of by Pref.

    State:
        theta: Client models as last trained, [N, P].
        ref: Mixtures before training, [N, P] (reference="aggregated").
        pref: Pref - I, [N, N].
        uploaded: Client models as the server has them, [N, P], if uploads are private or compressed.
        last: Uploads of the last cohort, [K', P].
        prev: Client indices of the last cohort, [K'].
    """

    def __init__(
        self,
        models: NonNegativeInt = 8,
        held_out: UnitInterval = 0.2,
        reference: Literal["aggregated", "trained"] = "aggregated",
        epsilon: Probability = 0.0,
    ):
        self.models, self.held_out, self.reference, self.epsilon = models, held_out, reference, epsilon
        self.last: Any = None  # before the first upload
        self.uploaded: Rows | None = None  # before the first private or compressed upload

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set all clients' models theta_i [N, P] to the initial model, and their preferences Pref [N, N] to I.

        Pref[i, j] is how much client i prefers the model of client j.  `rows` stores theta_i and Pref.  Also split each
        client's training samples: the fraction `held_out` compares models, and the rest trains.
        """
        w, self.rows = model.init_row(), rows  # `on_server` creates a further row store if it is needed
        self.theta = rows("theta", default=w)  # [N, P]; a row equals the default until it is set
        # the model to whose loss those of downloaded models are compared: the client's mixture or its trained model
        self.ref = rows("ref", default=w) if self.reference == "aggregated" else self.theta
        # Pref - I, where Pref[i, j] is how much client i prefers the model of client j
        self.pref = rows("pref", default=torch.zeros(federation.num_clients).to(w))  # [N, N], at first the default
        # splits each client's training samples into "remaining" and "held_out"; self.held_out: the fraction held out
        federation.hold_out(self.held_out)

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedFomo: from round 2 on clients mix downloaded models; then they train and upload."""
        theta = self.theta[cohort.ids]  # [K, P]
        if self.last is not None and self.models:  # last: the uploads of the last cohort [K', P]; models: the option M
            theta = self.mixed(cohort, theta, self.ref[cohort.ids])
        out = cohort.train(theta, how=LocalTraining(split="remaining"))
        if self.reference == "aggregated":  # the next mixture is compared to this one, before training
            self.ref[cohort.ids] = theta
        self.theta[cohort.ids] = out.theta
        # previous: the version that the server has; the change since then is sent
        up = cohort.upload(theta=out.theta, previous={"theta": self.on_server(cohort)})
        if self.uploaded is not None:  # None: uploads are not changed by privacy or compression, so theta_i suffices
            self.uploaded[cohort.ids] = up.theta
        self.last, self.prev = up.theta, cohort.index  # prev: the clients of the last cohort  [K']

    def on_server(self, cohort: Cohort) -> Tensor:
        """Return the models of the cohort's clients as last uploaded; of one that never uploaded, the initial model.

        # [K, P]
        """
        if cohort.is_lossless:  # the server has theta_i itself, so no copy is stored
            return self.theta[cohort.ids]
        if self.uploaded is None:
            self.uploaded = self.rows("uploaded", default=self.theta.default)
        return self.uploaded[cohort.ids]

    def mixed(self, cohort: Cohort, theta: Tensor, ref: Tensor) -> Tensor:
        """Mix the models that each client downloads, and update its preferences Pref for the clients that trained them.

        Args:
            cohort: The clients i.
            theta: Their models.  # [K, P]
            ref: Their reference models ref_i, to whose loss the downloaded ones are compared.  # [K, P]

        Returns:
            sum_j omega_j theta_j, or theta_i if no downloaded model has a lower loss.  # [K, P]
        """
        chosen = self.choose(cohort)  # positions j in the last cohort, whose indices are self.prev  [K, M]
        # the same as a mask, by which fetch counts the bytes of the downloads
        is_chosen = torch.zeros(len(cohort), len(self.prev), dtype=torch.bool, device=chosen.device)  # [K, K']
        is_chosen.scatter_(1, chosen, value=True)
        others = cohort.fetch(is_chosen, theta=self.last).theta[chosen]  # theta_j  [K, M, P]
        omega = self.weights(cohort, others, ref)  # [K, M]
        total = omega.sum(1, keepdim=True)  # [K, 1]
        omega = torch.where(total > 0, omega / total, 0)
        # previous None: omega is sent as it is, not as a change, because the server has no earlier value
        uploaded = cohort.upload(omega=omega, previous={"omega": None}, uncompressed=["omega"]).omega
        self.pref[cohort.ids] = self.pref[cohort.ids].scatter_add(1, self.prev[chosen], uploaded)
        mixture = (omega[:, None] @ others)[:, 0]  # [K, P]
        return torch.where(total > 0, mixture, theta)

    def weights(self, cohort: Cohort, others: Tensor, ref: Tensor) -> Tensor:
        """Return the weights of downloaded models before normalization: how much they lower the loss.

        omega_j = max(L(ref_i) - L(theta_j), 0) / (||theta_j - ref_i|| + 1e-5), with the loss L on held-out samples.

        Args:
            cohort: The clients i.
            others: Downloaded models theta_j.  # [K, M, P]
            ref: Reference models ref_i.  # [K, P]

        Returns:
            Weights.  # [K, M]
        """
        gain = cohort.loss(ref, split="held_out")[:, None] - cohort.loss(others, split="held_out")  # [K, M]
        trained = cohort.model.trained  # columns without running statistics
        ref = trained.take(ref)
        distance = torch.stack([(trained.take(theta_j) - ref).norm(dim=1) for theta_j in others.unbind(1)], 1)
        return gain.clamp_min(0) / (distance + 1e-5)

    def choose(self, cohort: Cohort) -> Tensor:
        """Select the M models that each client downloads: those of largest Pref, or random ones (epsilon).

        Pref[i, j] is how much client i preferred the model of client j so far.

        Args:
            cohort: The clients i.

        Returns:
            Positions in the last cohort, whose uploads are offered.  # [K, M]
        """
        draws = cohort.random("fedfomo")  # random numbers of each client
        is_self = cohort.index[:, None] == self.prev  # whether j is i  [K, K']
        order = by_preference(self.pref[cohort.ids][:, self.prev] + is_self, draws)  # self.pref is Pref - I
        M = min(self.models, len(self.prev))
        # explored: each of the M is a random one with probability epsilon
        return (explored(order, self.epsilon, M, draws) if self.epsilon else order)[:, :M]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the clients' own models as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]


def by_preference(pref: Tensor, draws: RowRandom) -> Tensor:
    """Return the order of each client's candidates by descending preference, with ties in random order.

    Args:
        pref: Preference of K clients for K' candidates.  # [K, K']
        draws: Random number generator of each client.

    Returns:
        Positions of the candidates, the preferred one first.  # [K, K']
    """
    shuffled = draws.uniform(pref.shape[1]).argsort(1)  # a random order of the positions
    best = pref.gather(1, shuffled).argsort(dim=1, descending=True, stable=True)  # stable: ties stay shuffled
    return shuffled.gather(1, best)  # back to positions


def explored(order: Tensor, epsilon: float, M: int, draws: RowRandom) -> Tensor:
    """Reorder downloads so that each of the M is selected at random with probability epsilon.

    If m of the M downloads are selected by preference, the first m entries stay, and the others follow at random.

    Args:
        order: Positions by preference.  # [K, K']
        epsilon: Probability of a random download.
        M: Number of downloads.
        draws: Random number generator of each client.

    Returns:
        Positions, of which the first M are downloaded.  # [K, K']
    """
    size = order.shape[1]
    m = (draws.uniform(M) >= epsilon).sum(1, keepdim=True)  # downloads by preference  [K, 1]
    rank = torch.arange(size, device=order.device)
    random_key = size + draws.uniform(size)  # larger than every rank  [K, K']
    return order.gather(1, torch.where(rank < m, rank, random_key).argsort(1))
