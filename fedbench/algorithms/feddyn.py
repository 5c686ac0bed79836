"""FedDyn: dynamic regularization with a linear and a quadratic term aligns local optima with the global one.

Acar et al., ICLR 2021, Algorithm 1:  theta_i <- argmin f_i(theta) - <g_i, theta> + (alpha/2) ||theta - w||^2.
Server:  h <- h - alpha sum_i (theta_i - w) / N  over the cohort,  w <- mean of the cohort's theta_i - h / alpha.
With one alpha_i per client, client i uses alpha_i, and the server computes
    h <- h - sum_i alpha_i (theta_i - w) / N,   w <- sum_i alpha_i theta_i / sum_i alpha_i - h / (mean of all alpha_i),
with sums over the cohort.  So h stays the mean of all g_i, and both sides minimize the augmented Lagrangian
sum_i f_i(theta_i) - <g_i, theta_i - w> + (alpha_i/2) ||theta_i - w||^2, client i over theta_i and the server over w.
Departs from the paper: SGD epochs replace the argmin, as in all codes.  The authors' weight decay and clipping are
options of the optimizer.  The added terms pass through momentum like the gradient.  BatchNorm buffers are averaged.
Reduces to: FedProx(mu = alpha) within a client, in its first participation.
"""

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, RowStore
from fedbench.core.options import Positive
from fedbench.engine.per_client import fractions, mean, per_client


class FedDyn(Algorithm):
    """FedDyn.  g_i: gradient of client i at its last optimum; h: mean of all g_i.

    Args:
        alpha: Weight of the quadratic term, > 0.  A list sets one value per client.

    State:
        w: Server model, [P].
        h: Server state, the mean of all g_i, [P].
        g: Gradient at each client's last local optimum, [N, P].
    """

    def __init__(self, alpha: Positive | list[Positive] = 0.1):
        self.alpha = per_client(alpha)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] to the initial model, and the linear terms h [P] (server) and g_i (clients) to 0.

        `rows` stores g_i [N, P].
        """
        self.w = model.init_row()  # [P]
        self.h = torch.zeros_like(self.w)  # [P]
        self.g = rows("g", default=self.h)  # [N, P]; a row equals the default until it is set
        self.trained = model.trained  # columns of parameters, without running statistics

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedDyn: clients train with the linear and quadratic term; the server updates h and w.

        The loss of client i gets -<g_i, theta> + (alpha/2) |theta - w|^2.  h is the mean of all g_i.  alpha is one
        number, or one per client; the server then divides h by the mean of all.
        """
        g, alpha = self.g[cohort.ids], cohort.value(self.alpha)  # [K, P], a number or [K, 1]
        w = cohort.broadcast(w=self.w).w  # [P]
        # g becomes s.state.g; s.value: one number, or [k, 1] if alpha is a list
        out = cohort.train(w, g=g, extra_grad=lambda s: s.value(self.alpha) * (s.theta - w) - s.state.g)
        self.g[cohort.ids] = g - alpha * (out.theta - w)
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # [K, P]
        self.h = self.h - cohort.sum(alpha * (up.theta - self.w)) / cohort.num_clients  # mean over all N clients
        # weights proportional to alpha, if clients have different ones  [P]
        mean_theta = cohort.mean(up.theta, weights=fractions(self.alpha, cohort.context))
        # running statistics get the plain mean
        self.w = self.trained.put(mean_theta, self.trained.take(mean_theta - self.h / mean(self.alpha)))

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return what the cohort deploys, the server model w for every client.  # [P]

        `final`, whether the last round is over, changes nothing.
        """
        return cohort.broadcast(w=self.w).w

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
