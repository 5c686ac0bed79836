"""pFedMe: the server's model as the Moreau envelope of the clients' risks; the proximal points are the personal models.

Dinh et al., NeurIPS 2020, Algorithm 1.  Per batch: inner_steps steps of size inner_lr on
f_i(theta; batch) + (lam/2) ||theta - w_i||^2, theta going on from the batch before; then
w_i <- w_i - lam lr (w_i - theta).  The server: w <- (1 - beta) w + beta (mean of w_i).
Departs from the paper: aggregation weighted by samples.  The optimizer takes the inner steps, so that momentum and
weight decay act there (the code behind the PFL benchmarks hides a weight decay of 1e-3: optimizer.weight_decay), and
that code deploys w_i where the method says theta_i: deploy="w".  BatchNorm buffers of w_i are theta_i's.
"""

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, Optimizer, RowStore, Step
from fedbench.core.options import Count, NonNegative, Positive, require
from fedbench.engine.per_client import per_client


class PFedMe(Algorithm):
    """lam: pull towards w_i; inner_lr, inner_steps: of the proximal point; beta: step of the server.  lam and inner_lr
    may be lists, one for each client.

    State: w [P]; theta [N, P], what client i deploys.
    """

    def __init__(
        self,
        lam: NonNegative | list[NonNegative] = 15.0,
        inner_lr: Positive | list[Positive] = 0.01,
        inner_steps: Count = 5,
        beta: NonNegative = 1.0,
        deploy: Literal["theta", "w"] = "theta",
    ):
        self.lam, self.inner_lr, self.inner_steps = per_client(lam), per_client(inner_lr), inner_steps
        self.beta, self.deploy = beta, deploy

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """The server must not extrapolate variances."""
        super().check(federation, model, optimizer)
        require(
            self.beta <= 1 or not model.buffer_names,
            f"algorithm.beta={self.beta:g} would extrapolate this model's BatchNorm statistics: it must be <= 1",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all."""
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # lazy [N, P]
        self.trained = model.trained

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w, step=self.step, w=w.expand(len(cohort), -1))
        w_i = self.trained.put(out.theta, self.trained.take(out.w))  # [K, P]
        self.theta[cohort.ids] = out.theta if self.deploy == "theta" else w_i
        up = cohort.upload(w=w_i, relative_to={"w": "w"})
        self.w = self.w + self.beta * (cohort.mean(up.w) - self.w)

    def step(self, s: Step, batch: Batch) -> None:
        """The proximal point of the batch, then w_i towards it."""
        for _ in range(self.inner_steps):
            g, pull = s.grad(batch), (s.theta - s.state.w).mul_(s.value(self.lam))  # [k, P]
            self.trained.view(g).add_(self.trained.take(pull))  # into g
            s.descend(g, lr=s.value(self.inner_lr))
        s.state.w.sub_((s.state.w - s.theta).mul_(s.lr).mul_(s.value(self.lam)))

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """theta_i (deploy="w": w_i) as last trained."""
        return self.theta[cohort.ids]

    def global_row(self) -> Tensor:
        """w."""
        return self.w
