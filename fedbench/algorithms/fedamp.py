"""FedAMP: the server sends each client a mixture of all models in which those near its own weigh more.

Huang et al., AAAI 2021, Algorithm 1, for  sum_i f_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2),  A(x) = 1 - exp(-x/sigma).
X_ij = alpha_k exp(-||w_i - w_j||^2 / sigma) / sigma for j != i, X_ii = 1 - sum_j X_ij, u_i = sum_j X_ij w_j; the client
minimizes f_i(w) + lam / (2 alpha_k) ||w - u_i||^2 by SGD.
Departs from the paper: local SGD starts from the client's own model, as in PFLlib, and is not run to the minimum.
Partial participation: w_j is the latest upload of every client that has made one.
Distances are over the trained columns: with a million of them they are in the hundreds, so that X is I unless sigma
grows with the model.  sigma="auto": the median of the cohort's squared distances to the others; cap: the X_ij, j != i,
are scaled to a sum of at most cap.
Departs from PFLlib, whose values the options have: its term ||w - u_i|| is built of numbers without a gradient, so that
there FedAMP trains as Local does; here it pulls, and squared, as the paper's.
Reduces to: Local at lam = 0.
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
BLOCK = 256  # models of other clients gathered at a time


class FedAMP(Algorithm):
    """lam (or a list, one for each client), sigma, cap (null: none): above; alpha_k: step of the server, times decay
    every decay_every rounds.

    State: theta [N, P], what client i last trained; w [N, P], the server's copy of it as uploaded.
    """

    starts_from_cloud = False  # local SGD starts from u_i

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
        """Warn of weights that may be negative while models are close."""
        super().check(federation, model, optimizer)
        require(
            self.sigma != "auto" or self.cap is not None,
            "algorithm.sigma=auto needs algorithm.cap, e.g. 0.9: weights grow as 1 / sigma, which is not known yet",
        )
        if self.cap is not None:
            return  # no weight can be negative
        others, sigma = federation.num_clients - 1, float(self.sigma)
        if self.alpha_k * others <= sigma:
            return
        log.warning(
            "algorithm.alpha_k=%g, algorithm.sigma=%g, %d other clients: while models are close, the weight of "
            "a client's own one is negative; alpha_k <= %.3g excludes it",
            self.alpha_k,
            sigma,
            others,
            sigma / others,
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All clients start from one model."""
        read = 8 * rows.most * model.size  # bytes, to compare and to mix
        if read >= 1 << 30:
            log.info(
                "every round compares its %d clients with all who have taken part before, up to %s: %.1f GiB of "
                "models are read",
                federation.cohort_size,
                f"{rows.most:,}",
                read / 2**30,
            )
        self.columns = model.trained
        self.theta, self.w = (rows(name, default=model.init_row()) for name in ("theta", "w"))  # lazy [N, P]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: u_i at the server, then client i minimizes f_i(w) + lam / (2 alpha_k) ||w - u_i||^2."""
        theta, w_i, alpha = self.theta[cohort.ids], self.w[cohort.ids], self.alpha(cohort.round)  # [K, P], [K, P]
        u = cohort.download(u=self.cloud(cohort, w_i, alpha)).u
        weight = self.lam / alpha
        pull = (lambda s: (s.theta - s.state.u).mul_(s.value(weight))) if self.lam else None
        out = cohort.train(u if self.starts_from_cloud else theta, extra_grad=pull, u=u)
        self.theta[cohort.ids] = out.theta
        # a row that a client keeps and trains on replaces w_i; one that is trained from u_i adds to that
        relative_to, replaces = ({"w": "u"}, {}) if self.starts_from_cloud else ({}, {"w": w_i})
        self.w[cohort.ids] = cohort.upload(w=out.theta, relative_to=relative_to, replaces=replaces).w

    def alpha(self, round: int) -> float:
        """alpha_k in a round."""
        return self.alpha_k * self.decay ** (round // self.decay_every)

    def cloud(self, cohort: Cohort, w_i: Tensor, alpha: float) -> Tensor:
        """u_i = sum_j X_ij w_j, a block of models w_j at a time; X_ii is what is left of 1.  w_i [K, P]  # [K, P]"""
        peers = self.peers()
        blocks = np.split(peers, range(BLOCK, len(peers), BLOCK)) if len(peers) else []
        if not blocks:
            return w_i
        take = self.columns.take
        compared = torch.cat([self.compare(take(w_i), take(self.w[ids])) for ids in blocks], 1)  # [K, M]
        is_other = torch.from_numpy(cohort.ids[:, None] != peers).to(w_i.device)  # [K, M] bool
        X = self.attention(compared, is_other, alpha)  # [K, M]
        u = (1 - X.sum(1, keepdim=True)) * w_i
        for ids, x in zip(blocks, X.split(BLOCK, 1)):
            u += x @ self.w[ids]
        return u

    def peers(self) -> np.ndarray:
        """Return the clients whose models are mixed: all that have uploaded one."""
        return self.w.touched()

    def compare(self, w_i: Tensor, w_j: Tensor) -> Tensor:
        """||w_i - w_j||^2 of models [K, p] and [m, p].  # [K, m]"""
        return squared_distances(w_i, w_j)

    def attention(self, distances: Tensor, is_other: Tensor, alpha: float) -> Tensor:
        """X_ij where j != i (is_other), 0 elsewhere.  # [K, M]"""
        sigma = median_distance(distances) if self.sigma == "auto" else float(self.sigma)
        X = torch.where(is_other, alpha / sigma * torch.exp(-distances / sigma), 0)
        return X if self.cap is None else X * (self.cap / X.sum(1, keepdim=True)).clamp_max(1)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """w_i as last trained."""
        return self.theta[cohort.ids]


def median_distance(distances: Tensor) -> float:
    """Median distance of models that differ (nobody does from itself); 1 while none do, as nothing then changes."""
    positive = distances[distances > 0]
    return float(positive.median()) if len(positive) else 1.0
