"""PGFed: each client minimizes its own risk plus a learned mixture of the others', each to first order.

Luo et al., ICCV 2023:  F_i = f_i(theta_i) + mu sum_j a_ij f_j(theta_i),
with f_j(theta_i) ~ f_j(theta_j) + g_j.(theta_i - theta_j).
beta > 0 is PGFedMo: the auxiliary gradient is smoothed over a client's participations.
Departs from the paper's box, as its released code does: a_ij is clamped at 0; g.theta in the update of a is taken
before the step of theta; the coefficient of the mean gradient is 1/K'.  Round 1 is FedAvg.
Within a round nothing depends on a, whose update of every local step is therefore made up for after the last one.
Reduces to: FedAvg-local at mu = 0, bit for bit; PGFed at beta = 0.
"""

from typing import Any

import torch

from fedbench.algorithms.base import Algorithm
from fedbench.core.linalg import dot
from fedbench.core.options import NonNegative, Positive, Probability
from fedbench.engine.per_client import mean, own, per_client

MOVES = 1 << 20         # of coefficients at once


class PGFed(Algorithm):
    """mu: weight of the auxiliary risks; eta2: learning rate of a; beta: momentum of the auxiliary gradient;
    alpha_max: upper bound of a (null: none); drop_last: take g_j over full batches only, as the released code.
    mu, eta2, beta and alpha_max may be lists, one number for each client i that minimizes its F_i.

    State: w [P]; theta [N, P], what client i last trained; A [N, N]; aux [N, P] (beta > 0); of the last cohort
    G [K', P], c [K'] (mu included; of a list, the mean), gbar [P] (likewise), prev [K'].
    """

    def __init__(self, mu: NonNegative | list[NonNegative] = 0.1, eta2: NonNegative | list[NonNegative] = 0.01,
                 beta: Probability | list[Probability] = 0.0, alpha_max: Positive | list[Positive] | None = None,
                 drop_last: bool = False):
        self.mu, self.eta2, self.beta, self.alpha_max = map(per_client, (mu, eta2, beta, alpha_max))
        self.drop_last = drop_last
        self.G: Any = None                                                            # no cohort yet

    def setup(self, federation, model, rows):
        self.w = model.init_row()                                                     # [P]
        self.theta = rows("theta", default=self.w)                                    # lazy [N, P]
        even = torch.full((federation.num_clients,), 1 / federation.cohort_size)
        self.A = rows("A", default=even.to(self.w))                                   # lazy [N, N]
        self.smooth = rows("aux", default=torch.zeros_like(self.w)) if self.beta else None

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        if self.G is None or not self.mu:                                             # round 1 is FedAvg
            out = self.first(cohort, w)
        else:
            out = self.train(cohort, w)
        self.theta[cohort.ids] = out.theta
        if not self.mu:
            self.w = cohort.weights @ cohort.upload(theta=out.theta).theta
            return
        up = self.upload(cohort, out)
        self.w = cohort.weights @ up.theta
        mu = mean(self.mu)
        self.G, self.c, self.gbar, self.prev = up.g, mu * up.c, mu * up.g.mean(0), cohort.index

    def first(self, cohort, w):
        return cohort.train(w)

    def upload(self, cohort, out):
        """theta_i, and the risk f_i to first order around it, c_i + g_i . theta: theta [K, P], g [K, P], c [K]."""
        g, f = cohort.gradient(out.theta, drop_last=self.drop_last)                   # [K, P], [K]
        return cohort.upload(theta=out.theta, g=g, c=f - dot(g, out.theta), around={"g": None})

    def train(self, cohort, w):
        A = self.A[cohort.ids]                                                        # [K, N]
        alpha = A[:, self.prev]                                                       # [K, K']
        aux = self.smoothed(cohort, own(self.mu, cohort) * alpha @ self.G)            # [K, P]
        sent = cohort.download(aux=aux)
        shared = cohort.broadcast(gbar=self.gbar, c=self.c)
        rate = own(self.eta2 * (self.mu / mean(self.mu)), cohort)                     # mu is in gbar and c

        def step(s, batch):                                                           # theta.gbar before the step
            s.lift[:, s.t] = s.advance(batch, plus=s.aux, along=shared.gbar)

        out = cohort.train(w, step=step, aux=sent.aux, lift=alpha.new_zeros(len(cohort), cohort.longest))
        new = learned(alpha, rate, shared.c, out.lift, out.steps, own(self.alpha_max, cohort))
        A[:, self.prev] = self.received(cohort, new, alpha)
        self.A[cohort.ids] = A
        return out

    def received(self, cohort, new, old):
        """The uploaded a_ij, which noise may have taken out of their range.  # [K, K']"""
        return bounded(cohort.upload(alpha=new, around={"alpha": old}).alpha, own(self.alpha_max, cohort))

    def smoothed(self, cohort, aux):
        """PGFedMo: (1 - beta) aux + beta (what the client used last time), nothing to smooth at first."""
        if self.smooth is None:
            return aux
        new, old = own(1 - self.beta, cohort), own(self.beta, cohort)
        again = self.smooth.has(cohort.ids)[:, None]                                  # [K, 1]
        aux = torch.where(again, new * aux + old * self.smooth[cohort.ids], aux)
        self.smooth[cohort.ids] = aux
        return aux

    def personalized(self, cohort, final):
        return self.theta[cohort.ids]

    def global_row(self):
        return self.w

    def matrices(self):
        return {"A": self.A.whole()}


def learned(alpha, rate, c, lift, steps, most):
    """a_ij after a client's local steps t = 1 .. steps_i, a_ij <- [a_ij - rate_i (c_j + lift_it)] within 0 and most.

    alpha [K, K']; rate: a number or [K, 1]; c [K'] or [K, K']; lift [K, T]; steps [K] float32.  Without an upper bound
    a run of steps is one: with X_t the sum of its first t moves, the last a is max(a, max_t X_t) - X_T.  # [K, K']
    """
    run = max(1, MOVES // alpha.numel()) if most is None else 1
    within = torch.arange(lift.shape[1], device=lift.device) < steps[:, None]         # [K, T]
    for at in range(0, lift.shape[1], run):
        now = slice(at, at + run)
        move = (rate * (c + lift.T[now, :, None])) * within.T[now, :, None]           # [t, K, K']
        X = move.cumsum(0)
        alpha = torch.maximum(alpha, X.amax(0)) - X[-1]
        alpha = alpha if most is None else alpha.clamp_(max=most)
    return alpha


def bounded(alpha, most):
    """Coefficients [k, K'] kept, in place, between 0 and most (a number, one each [k, 1], or None: no bound)."""
    alpha.clamp_(min=0)
    return alpha if most is None else alpha.clamp_(max=most)
