"""PGFed: each client minimizes its own risk plus a learned mixture of the others', each to first order.

Luo et al., ICCV 2023, Algorithm 1:  F_i = f_i(theta_i) + mu sum_j a_ij f_j(theta_i), where j is of the last cohort and
f_j(theta_i) ~ c_j + g_j . theta_i,  g_j = grad f_j(theta_j),  c_j = f_j(theta_j) - g_j . theta_j.  For every batch:
    theta_i <- theta_i - eta1 (grad f_i(theta_i) + aux_i),         aux_i = mu sum_j a_ij g_j
    a_ij <- a_ij - eta2 (mu c_j + gbar . theta_i) for all j,       gbar = mu / K' sum_j g_j
beta > 0 is PGFedMo:  aux_i <- (1 - beta) aux_i + beta (aux_i of client i's last participation).  Round 1 is FedAvg.
Departs from the paper's box, as its released code does: theta_i moves by the configured optimizer; a_ij is kept at 0
or above; theta_i in the update of a_ij is the one before its own update; the coefficient of the mean gradient is
1 / K', of the last cohort.  g_j is over all samples (drop_last: over full batches, as released).
Reduces to: FedAvg-local at mu = 0, bit for bit; PGFed at beta = 0.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedbench.algorithms._deferred import coefficients_after
from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, RowStore, Step
from fedbench.core.linalg import dot
from fedbench.core.options import NonNegative, Positive, Probability
from fedbench.engine.per_client import mean, per_client


class PGFed(Algorithm):
    """mu: weight of the auxiliary risks; eta2: learning rate of a; beta: momentum of the auxiliary gradient;
    alpha_max: upper bound of a (null: none); drop_last: take g_j over full batches only, as the released code.
    mu, eta2, beta and alpha_max may be lists, one number for each client i that minimizes its F_i.

    State: w [P]; theta [N, P], what client i last trained; A [N, N]; aux [N, P] (beta > 0); of the last cohort
    G [K', P], c [K'] (mu included; of a list, the mean), gbar [P] (likewise), prev [K'], who it was.
    """

    def __init__(
        self,
        mu: NonNegative | list[NonNegative] = 0.1,
        eta2: NonNegative | list[NonNegative] = 0.01,
        beta: Probability | list[Probability] = 0.0,
        alpha_max: Positive | list[Positive] | None = None,
        drop_last: bool = False,
    ):
        self.mu, self.eta2, self.beta, self.alpha_max = map(per_client, (mu, eta2, beta, alpha_max))
        self.drop_last = drop_last
        self.G: Any = None  # no cohort yet

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All clients start from one model, with a_ij = 1 / K."""
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # lazy [N, P]
        even = torch.full((federation.num_clients,), 1 / federation.cohort_size)
        self.A = rows("A", default=even.to(self.w))  # lazy [N, N]
        self.aux = rows("aux", default=torch.zeros_like(self.w)) if self.beta else None

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1, lines 4 to 17."""
        w = cohort.broadcast(w=self.w).w
        without_others = self.G is None or not self.mu  # in the first round, and always with mu = 0
        out = cohort.train(w) if without_others else self.train(cohort, w)
        self.theta[cohort.ids] = out.theta
        if not self.mu:
            self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)
            return
        up = self.upload(cohort, out)
        self.w = cohort.mean(up.theta)
        mu = mean(self.mu)
        self.G, self.c, self.gbar, self.prev = up.g, mu * up.c, mu * (cohort.sum(up.g) / len(cohort)), cohort.index

    def train(self, cohort: Cohort, w: Tensor) -> SimpleNamespace:
        """ClientUpdate from round 2 on, lines 4 to 11."""
        aux = self.download_auxiliary(cohort)  # [K, P]
        server = cohort.broadcast(gbar=self.gbar, c=self.c, uncompressed=["c"])  # [P], [K']

        def step(s: Step, batch: Batch) -> None:
            """theta_i <- theta_i - eta1 (grad f_i(theta_i) + aux_i); gbar . theta_i is taken before it."""
            g = s.grad(batch)  # [k, P]
            s.record("gbar_theta", dot(s.theta, server.gbar))
            s.descend(g.add_(s.state.aux))

        out = cohort.train(w, step=step, aux=aux, gbar_theta=cohort.step_record())
        # line 10, a_ij after every local step, made up for here: no other line of a step reads a_ij (_deferred.py)
        alpha, alpha_max = self.coefficients(cohort), cohort.value(self.alpha_max)  # [K, K']
        new = coefficients_after(alpha, self.coefficient_rate(cohort), server.c, out.gbar_theta, out.steps, alpha_max)
        self.upload_coefficients(cohort, new, alpha)
        return out

    def upload(self, cohort: Cohort, out: Any) -> SimpleNamespace:
        """theta_i, and the risk f_i to first order around it, c_i + g_i . theta: theta [K, P], g [K, P], c [K]."""
        g, f = cohort.gradient(out.theta, drop_last=self.drop_last)  # [K, P], [K]
        c = f - dot(g, out.theta)
        return cohort.upload(theta=out.theta, g=g, c=c, relative_to={"theta": "w"}, replaces={"g": None, "c": None})

    # -- auxiliary gradients and coefficients --------------------------------------------------------------
    def download_auxiliary(self, cohort: Cohort) -> Tensor:
        """aux_i = mu sum_j a_ij g_j; with beta, smoothed over the client's participations.  # [K, P]"""
        aux = cohort.value(self.mu) * self.coefficients(cohort) @ self.G
        if self.aux is not None:
            before, beta, rest = self.aux[cohort.ids], cohort.value(self.beta), cohort.value(1 - self.beta)
            has_before = self.aux.has(cohort.ids)[:, None]  # [K, 1]: otherwise there is nothing to smooth with
            aux = torch.where(has_before, rest * aux + beta * before, aux)
            self.aux[cohort.ids] = aux
        return cohort.download(aux=aux).aux

    def coefficients(self, cohort: Cohort) -> Tensor:
        """a_ij of the cohort's clients i and the last cohort's clients j.  # [K, K']"""
        return self.A[cohort.ids][:, self.prev]

    def coefficient_rate(self, cohort: Cohort) -> Any:
        """eta2 mu_i / mean(mu), as c and gbar were sent with mean(mu) in them: with one mu for all, eta2.  # [K, 1]"""
        return cohort.value(self.eta2 * (self.mu / mean(self.mu)))

    def upload_coefficients(self, cohort: Cohort, new: Tensor, old: Tensor) -> None:
        """Clients send a_ij [K, K'], which noise (privacy) may take out of their range."""
        up = cohort.upload(alpha=new, replaces={"alpha": old}, uncompressed=["alpha"])
        self.keep_coefficients(cohort, bounded(up.alpha, cohort.value(self.alpha_max)))

    def keep_coefficients(self, cohort: Cohort, alpha: Tensor) -> None:
        """A[i] <- a_i, in the columns of the last cohort.  alpha [K, K']"""
        A = self.A[cohort.ids]  # [K, N]
        A[:, self.prev] = alpha
        self.A[cohort.ids] = A

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """theta_i as last trained."""
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """w."""
        return self.w

    def matrices(self) -> dict[str, Tensor]:
        """A: how much client i (row) makes of client j's risk."""
        return {"A": self.A.whole()}


def coefficient_step(alpha: Tensor, eta2: Any, c: Tensor, gbar_theta: Tensor, alpha_max: Any) -> Tensor:
    """ClientUpdate, line 10, and the bounds: what `coefficients_after` does for every local step.  # [K, K']"""
    return bounded(alpha - eta2 * (c + gbar_theta), alpha_max)


def bounded(alpha: Tensor, alpha_max: Any) -> Tensor:
    """Coefficients [K, K'] kept, in place, between 0 and alpha_max (a number, one each [K, 1], or None: no bound)."""
    alpha.clamp_(min=0)
    return alpha if alpha_max is None else alpha.clamp_(max=alpha_max)
