"""PGFed: each client minimizes its risk plus learned multiples of the other clients' risks, to first order.

Luo et al., ICCV 2023, Algorithm 1:  F_i = f_i(theta_i) + mu sum_j a_ij f_j(theta_i), where j is in the last cohort and
f_j(theta_i) ~ c_j + g_j . theta_i,  g_j = grad f_j(theta_j),  c_j = f_j(theta_j) - g_j . theta_j.  For every batch:
    theta_i <- theta_i - eta1 (grad f_i(theta_i) + aux_i),         aux_i = mu sum_j a_ij g_j
    a_ij <- a_ij - eta2 (mu c_j + gbar . theta_i) for all j,       gbar = mu / K' sum_j g_j
beta > 0 is PGFedMo:  aux_i <- (1 - beta) aux_i + beta (aux_i of client i's last participation).  Round 1 is FedAvg.
Departs from the paper's algorithm, as its released code does: the configured optimizer updates theta_i; a_ij is at
least 0; the update of a_ij uses theta_i before its update; the mean gradient is divided by K', the size of the last
cohort.  g_j is over all samples (drop_last: over full batches, as in the released code).
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
    """PGFed.  The K clients i of a round weigh the risks of the K' clients j of the last cohort by a_ij.

    With beta > 0 it is PGFedMo.  mu, eta2, beta and alpha_max may be lists with one value per client.

    Args:
        mu: Weight of the auxiliary risks, >= 0.
        eta2: Learning rate of the coefficients a_ij, >= 0.
        beta: Momentum of the auxiliary gradient, in [0, 1].
        alpha_max: Upper bound of a_ij; None sets no bound.
        drop_last: Whether g_j leaves out the last incomplete batch, as in the released code.

    State:
        w: Server model, [P].
        theta: Client models as last trained, [N, P].
        A: Coefficients a_ij, [N, N].
        aux: Auxiliary gradients of the clients' last participations, [N, P] (beta > 0).
        G: Gradients g_j of the last cohort, [K', P].
        c: mu c_j of the last cohort, [K']; with one mu per client, their mean.
        gbar: gbar of the last cohort, [P]; with one mu per client, their mean.
        prev: Client indices of the last cohort, [K'].
    """

    supports_client_ranks = True
    averages_one_model = True

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
        self.G: Any = None  # before the first round

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: server model w, equal client models, coefficients a_ij = 1 / K, and with beta a memory.

        The memory has the auxiliary gradients of the last participations, at first 0.
        """
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # [N, P]; a row equals the default until it is set
        even = torch.full((federation.num_clients,), 1 / federation.cohort_size)  # a_ij = 1 / K
        self.A = rows("A", default=even.to(self.w))  # [N, N]; a row equals the default until it is set
        # auxiliary gradients of the last participations, whose momentum is the option beta  [N, P]
        self.aux = rows("aux", default=torch.zeros_like(self.w)) if self.beta else None

    def round(self, cohort: Cohort) -> None:
        """Run one round of PGFed: clients train with gradients of other clients, and upload model and linear risk.

        Each client i uploads its risk near its model as the linear function f_i(theta) ~ c_i + g_i . theta.  Later
        clients minimize their risk plus mu times those of the last cohort, with learned weights a_ij.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        without_others = self.G is None or not self.mu  # in the first round, and always with mu = 0
        out = cohort.train(w) if without_others else self.train(cohort, w)
        self.theta[cohort.ids] = out.theta
        if not self.mu:
            up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # theta - w is sent, and the server adds w
            self.w = cohort.mean(up.theta, updates="w")  # the mean, or the option server's step towards it
            return
        up = self.upload(cohort, out)
        self.w = cohort.mean(up.theta, updates="w")
        mu = mean(self.mu)  # over clients, if each has its own
        # for the clients of the next round: the g_j [K, P], mu c_j [K], mu times the mean g_j [P], and the ids j
        self.G, self.c, self.gbar, self.prev = up.g, mu * up.c, mu * (cohort.sum(up.g) / len(cohort)), cohort.index

    def train(self, cohort: Cohort, w: Tensor) -> SimpleNamespace:
        """Run ClientUpdate (Algorithm 1, lines 4 to 11): train with auxiliary gradients, then update a_ij.

        Args:
            cohort: The clients.
            w: The received server model.  # [P]

        Returns:
            The output of `cohort.train`.
        """
        aux = self.download_auxiliary(cohort)  # [K, P]
        server = cohort.broadcast(gbar=self.gbar, c=self.c, uncompressed=["c"])  # [P], [K']

        def step(s: Step, batch: Batch) -> None:
            """Take one local step of theta_i along its gradient plus aux_i, that of other clients' risks.

            Before it, the scalar product of gbar, the received mean gradient, and theta_i is recorded.
            """
            g = s.grad(batch)  # [k, P]
            s.record("gbar_theta", dot(s.theta, server.gbar))  # stores the value of each step in out.gbar_theta
            s.descend(g.add_(s.state.aux))

        # step_record: an empty record of one number per client and step, which s.record fills  [K, T]
        out = cohort.train(w, step=step, aux=aux, gbar_theta=cohort.step_record())
        # line 10, the update of a_ij after every local step: no other line of a step reads a_ij (_deferred.py)
        alpha, alpha_max = self.coefficients(cohort), cohort.value(self.alpha_max)  # [K, K']
        new = coefficients_after(alpha, self.coefficient_rate(cohort), server.c, out.gbar_theta, out.steps, alpha_max)
        self.upload_coefficients(cohort, new, alpha)
        return out

    def upload(self, cohort: Cohort, out: Any) -> SimpleNamespace:
        """Upload the trained models and a linear model of each risk f_i around its theta_i.

        Args:
            cohort: The clients.
            out: Output of `cohort.train`.

        Returns:
            What the server receives: theta [K, P], and g [K, P] and c [K] of f_i(theta) ~ c_i + g_i . theta.
        """
        # gradient and value of each f_i; drop_last: without a last batch that is smaller  [K, P], [K]
        g, f = cohort.gradient(out.theta, drop_last=self.drop_last)
        c = f - dot(g, out.theta)
        # theta - w is sent; g and c are sent as they are (None)
        return cohort.upload(theta=out.theta, g=g, c=c, relative_to={"theta": "w"}, previous={"g": None, "c": None})

    # -- auxiliary gradients and coefficients --------------------------------------------------------------
    def download_auxiliary(self, cohort: Cohort) -> Tensor:
        """Download the auxiliary gradient aux_i = mu sum_j a_ij g_j of each client.

        With beta > 0 it is averaged with that of the client's last participation.

        Args:
            cohort: The clients.

        Returns:
            The auxiliary gradients as received.  # [K, P]
        """
        # G: the gradients g_j of the last cohort's clients  [K', P]
        aux = cohort.value(self.mu) * self.coefficients(cohort) @ self.G  # [K, P]
        if self.aux is not None:
            # cohort.value: one number, or [K, 1] if beta is a list
            last, beta, one_minus_beta = self.aux[cohort.ids], cohort.value(self.beta), cohort.value(1 - self.beta)
            has_last = self.aux.has(cohort.ids)[:, None]  # whether the client took part before  [K, 1]
            aux = torch.where(has_last, one_minus_beta * aux + beta * last, aux)
            self.aux[cohort.ids] = aux
        return cohort.download(aux=aux).aux  # each client gets its own row

    def coefficients(self, cohort: Cohort) -> Tensor:
        """Return a_ij for the clients i of `cohort` and the K' clients j of the last round.  # [K, K']

        a_ij is the weight of client j's risk in client i's objective.
        """
        return self.A[cohort.ids][:, self.prev]

    def coefficient_rate(self, cohort: Cohort) -> Any:
        """Return the learning rate of a_ij: eta2 mu_i / mean(mu), because c and gbar contain mean(mu).

        With one mu for all clients it is eta2.  # a number or [K, 1]
        """
        return cohort.value(self.eta2 * (self.mu / mean(self.mu)))

    def upload_coefficients(self, cohort: Cohort, new: Tensor, old: Tensor) -> None:
        """Upload new coefficients a_ij, and store them within their bounds, which noise may violate.

        Args:
            cohort: The clients i.
            new: The new coefficients.  # [K, K']
            old: Those that the server has; the change is sent.  # [K, K']
        """
        # previous: the change since the old a_ij is sent
        up = cohort.upload(alpha=new, previous={"alpha": old}, uncompressed=["alpha"])
        self.store_coefficients(cohort, bounded(up.alpha, cohort.value(self.alpha_max)))

    def store_coefficients(self, cohort: Cohort, alpha: Tensor) -> None:
        """Write new coefficients a_ij of the cohort's clients i and the last round's K' clients j into A [N, N].

        Args:
            cohort: The K clients i.
            alpha: The coefficients.  # [K, K']
        """
        A = self.A[cohort.ids]  # [K, N]
        A[:, self.prev] = alpha
        self.A[cohort.ids] = A

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the clients' own models as last trained.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w

    def matrices(self) -> dict[str, Tensor]:
        """Return {"A": [N, N]}: A[i, j] is the weight of client j's risk in client i's objective."""
        return {"A": self.A.whole()}


def coefficient_step(alpha: Tensor, eta2: Any, c: Tensor, gbar_theta: Tensor, alpha_max: Any) -> Tensor:
    """Descend on the coefficients by line 10 of ClientUpdate, and clamp them to [0, alpha_max].

    The risk of client j is linearized as c_j + g_j . theta.  gbar is mu times the mean of all g_j, or with PGFed-CE
    mu g_j of each j.

    Args:
        alpha: Coefficients a_ij.  # [K, K']
        eta2: Learning rate of the coefficients, a number or [K, 1].
        c: mu c_j.  # [K'] or [K, K']
        gbar_theta: gbar . theta_i.  # [K, 1] or [K, K']
        alpha_max: Upper bound, a number or [K, 1]; None for no upper bound.

    Returns:
        New coefficients.  # [K, K']
    """
    return bounded(alpha - eta2 * (c + gbar_theta), alpha_max)


def bounded(alpha: Tensor, alpha_max: Any) -> Tensor:
    """Clamp coefficients in place to [0, alpha_max].

    Args:
        alpha: The coefficients.  # [K, K']
        alpha_max: Upper bound, a number or [K, 1]; None sets no upper bound.

    Returns:
        alpha.  # [K, K']
    """
    alpha.clamp_(min=0)
    return alpha if alpha_max is None else alpha.clamp_(max=alpha_max)
