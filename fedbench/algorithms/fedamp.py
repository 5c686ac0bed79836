"""FedAMP: attentive message passing; each client is pulled to a mixture of models that weights similar ones more.

Huang et al., AAAI 2021, Algorithm 1, for  sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2),  A(x) = 1 - exp(-x/sigma).
X_ij = alpha_k exp(-||w_i - w_j||^2 / sigma) / sigma for j != i, X_ii = 1 - sum_j X_ij, u_i = sum_j X_ij w_j; the client
minimizes f_i(w) + lam / (2 alpha_k) ||w - u_i||^2 by SGD.
Departs from the paper: local SGD starts from the client's own model, as in PFLlib, and is not run to the minimum.  With
partial participation, w_j is the latest upload of client j, for all clients that have uploaded.
sigma="auto" uses the median of the cohort's squared distances to the others.  cap scales X_ij, j != i, to a sum of at
most cap.
Departs from PFLlib, whose default values the options have: there the term ||w - u_i|| is detached and has no gradient,
so that FedAMP trains as Local does.  Here it is squared, as in the paper, and has its gradient.
Reduces to: Local at lam = 0.
Limits: distances are over the trained columns and grow with their number.  For a million parameters they are in the
hundreds, and X is the identity unless sigma grows too.
"""

import logging
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, Optimizer, RowStore
from fedbench.core.linalg import squared_distances
from fedbench.core.options import Count, Fraction, NonNegative, Positive, require
from fedbench.engine.per_client import per_client

log = logging.getLogger(__name__)
BLOCK = 256  # models of other clients gathered at once


class FedAMP(Algorithm):
    """FedAMP.  w_j: upload of client j; X_ij: its weight in client i's mixture u_i = sum_j X_ij w_j.

    Args:
        lam: Weight of the pull towards u_i, >= 0.  A list sets one value per client.
        alpha_k: Step size of the server; at most sigma / (N - 1) keeps all weights >= 0.
        sigma: Scale of squared distances, or "auto" for their median in the round.  "auto" needs cap.
        decay: Factor of alpha_k, applied every decay_every rounds.
        decay_every: Number of rounds between two decays.
        cap: Maximum sum of the other clients' weights X_ij; None sets no limit.

    State:
        theta: Client models as last trained, [N, P].
        w: Client models as last uploaded, [N, P].
    """

    starts_from_cloud = False  # whether local SGD starts from u_i

    def __init__(
        self,
        lam: NonNegative | list[NonNegative] = 1.0,
        alpha_k: Positive = 1.0,
        sigma: Positive | Literal["auto"] = 1.0,
        decay: Fraction = 1.0,
        decay_every: Count = 30,
        cap: Fraction | None = None,
    ):
        self.lam, self.alpha_k, self.sigma = per_client(lam), alpha_k, sigma
        self.decay, self.decay_every, self.cap = decay, decay_every, cap

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError if the option sigma is "auto" and cap is None.

        Warn if the weight X_ii of a client's own model may become negative.
        """
        super().check(federation, model, optimizer)
        require(
            self.sigma != "auto" or self.cap is not None,
            "algorithm.sigma=auto needs algorithm.cap, e.g. 0.9, but algorithm.cap is null: without it the weights of "
            "similar models, which grow as 1 / sigma, have no bound. Set algorithm.cap to a number in (0, 1]",
        )
        if self.cap is not None:
            return  # no weight can be negative
        others, sigma = federation.num_clients - 1, float(self.sigma)
        # X_ii is 1 minus the weights of the others, of which each is at most alpha_k / sigma
        if self.alpha_k * others <= sigma:
            return
        log.warning(
            "algorithm.alpha_k=%g, algorithm.sigma=%g, %d other clients: while models are close, the weight X_ii of a "
            "client's own model is negative; set algorithm.alpha_k to at most %.3g to exclude this",
            self.alpha_k,
            sigma,
            others,
            sigma / others,
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the clients' models, as last trained and as last uploaded, to the initial model.  # [N, P] each

        Both are stored by `rows`.
        """
        # rows.most: how many clients can ever upload
        read = 8 * rows.most * model.size  # bytes; models of 4 bytes per number are read twice, to compare and to mix
        if read >= 1 << 30:  # 1 GiB
            log.info(
                "algorithm=%s: every round compares its %d clients with all earlier participants (up to %s) and "
                "reads up to %.1f GiB of models",
                self._name,
                federation.cohort_size,
                f"{rows.most:,}",
                read / 2**30,
            )
        self.columns = model.trained  # columns by which models are compared, without running statistics
        self.theta, self.w = (rows(name, default=model.init_row()) for name in ("theta", "w"))  # [N, P]

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedAMP: clients get mixtures u_i of similar models, and train with a pull towards them.

        They train from their own models, or if `starts_from_cloud` from u_i.
        """
        theta, w_i, alpha = self.theta[cohort.ids], self.w[cohort.ids], self.alpha(cohort.round)  # [K, P], [K, P]
        u = cohort.download(u=self.cloud(cohort, w_i, alpha)).u  # each client's mixture u_i as received  [K, P]
        # weight of the pull towards u_i in the gradient, a number or one per client; alpha: the server's step size
        weight = self.lam / alpha
        # s.state.u: the u that is passed to `train`; s.value: the weights of the step's clients
        pull = (lambda s: (s.theta - s.state.u).mul_(s.value(weight))) if self.lam else None
        out = cohort.train(u if self.starts_from_cloud else theta, extra_grad=pull, u=u)
        self.theta[cohort.ids] = out.theta
        # the upload is a difference from the last upload w_i, or from u_i if training starts there
        relative_to, previous = ({"w": "u"}, {}) if self.starts_from_cloud else ({}, {"w": w_i})
        self.w[cohort.ids] = cohort.upload(w=out.theta, relative_to=relative_to, previous=previous).w

    def alpha(self, round: int) -> float:
        """Return the server's step size in a round.

        Args:
            round: Number of the round, from 0.

        Returns:
            alpha_k decay^(round // decay_every), where all three are options.
        """
        return self.alpha_k * self.decay ** (round // self.decay_every)

    def cloud(self, cohort: Cohort, w_i: Tensor, alpha: float) -> Tensor:
        """Return each client's mixture of all uploaded models, u_i = sum_j X_ij w_j, which the paper calls cloud model.

        Args:
            cohort: The clients i.
            w_i: Their models as last uploaded.  # [K, P]
            alpha: Step size alpha_k of the server in this round.

        Returns:
            The mixtures u_i.  # [K, P]
        """
        peers = self.peers()  # ids of all M clients that have uploaded so far
        # a few models at a time, to limit memory
        blocks = np.split(peers, range(BLOCK, len(peers), BLOCK)) if len(peers) else []
        if not blocks:
            return w_i
        take = self.columns.take  # the parameters of a row, without running statistics
        # squared distances, or what a subclass compares  [K, M]
        compared = torch.cat([self.compare(take(w_i), take(self.w[ids])) for ids in blocks], 1)
        is_other = torch.from_numpy(cohort.ids[:, None] != peers).to(w_i.device)  # [K, M] bool
        X = self.attention(compared, is_other, alpha)  # [K, M]
        u = (1 - X.sum(1, keepdim=True)) * w_i  # X_ii w_i  [K, P]
        for ids, x in zip(blocks, X.split(BLOCK, 1)):
            u += x @ self.w[ids]
        return u

    def peers(self) -> np.ndarray:
        """Return the ids of the clients whose models are mixed: all that have uploaded so far, ascending.

        # [M] int64
        """
        return self.w.touched()

    def compare(self, w_i: Tensor, w_j: Tensor) -> Tensor:
        """Return ||w_i - w_j||^2 of every model of w_i [K, p] and every model of w_j [m, p]; p trained parameters.

        # [K, m]
        """
        return squared_distances(w_i, w_j)

    def attention(self, distances: Tensor, is_other: Tensor, alpha: float) -> Tensor:
        """Return the weights X_ij of the other clients' models, which fall with the distance of the models.

        Args:
            distances: Squared distances ||w_i - w_j||^2 of the cohort's K clients i and of all M clients j that have
                uploaded so far, i perhaps among them.  # [K, M]
            is_other: Whether j != i.  # [K, M] bool
            alpha: Step size alpha_k of the server in this round.

        Returns:
            X_ij, and 0 where j = i: `cloud` adds the own weight X_ii, 1 minus the sum over j.  Where this sum is larger
            than `cap`, X_ij are scaled down to it; cap=None does not limit it.  # [K, M]
        """
        # sigma: scale of the squared distances; "auto": their median in this round, without the zeros of j = i
        sigma = median_distance(distances) if self.sigma == "auto" else float(self.sigma)
        X = torch.where(is_other, alpha / sigma * torch.exp(-distances / sigma), 0)
        return X if self.cap is None else X * (self.cap / X.sum(1, keepdim=True)).clamp_max(1)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the clients' own models as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]


def median_distance(distances: Tensor) -> float:
    """Return the median of the positive ones of distances [K, M]; 1.0 if none is positive, as no scale then matters.

    The distance of a client to itself is 0 and does not count.
    """
    positive = distances[distances > 0]
    return float(positive.median()) if len(positive) else 1.0
