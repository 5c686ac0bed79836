"""APFL: each client mixes a personal model with its copy of the global one.

Deng et al., 2020, Algorithm 1.  A batch, all at the values before it:  vbar = a v + (1 - a) w;
w <- w - lr grad f(w);  v <- v - lr a grad f(vbar);  adaptive, at the first step of a round:
a <- clip(a - lr <v - w, grad f(vbar)>, 0, 1).  A client deploys a v_i + (1 - a) w with the newly aggregated w.
Departs from the paper: aggregation weighted by samples; unless adaptive, a stays as it is, as in the released code.
BatchNorm buffers of v are those that the mixture saw.
Reduces to: FedAvg at alpha = 0; Local, beside an unchanged FedAvg, at alpha = 1.
"""

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, RowStore, Step
from fedbench.core.linalg import dot
from fedbench.core.options import Probability
from fedbench.engine.per_client import PerClient, mean, per_client


class APFL(Algorithm):
    """alpha: a, the share of the personal model, or a list, one for each client.  adaptive: a starts
    there and is learned.

    State: w [P]; v [N, P]; a [N, 1].
    """

    def __init__(self, alpha: Probability | list[Probability] = 0.5, adaptive: bool = False):
        self.alpha, self.adaptive = per_client(alpha), adaptive

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """v_i and w start from one model."""
        self.w = model.init_row()  # [P]
        self.v = rows("v", default=self.w)  # lazy [N, P]
        self.a = rows("a", default=torch.full_like(self.w[:1], mean(self.alpha)))  # lazy [N, 1]
        if isinstance(self.alpha, PerClient):
            all_ids = np.arange(federation.num_clients)
            self.a[all_ids] = self.alpha.of(all_ids, self.w.device)
        self.buffers = model.trained.rest(model.size)

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: w and v_i train together, w alone is sent."""
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(
            w,
            step=self.step,
            how=LocalTraining(buffers={"theta": "theta", "v": "v"}),
            v=self.v[cohort.ids],
            a=self.a[cohort.ids],
        )
        self.v[cohort.ids], self.a[cohort.ids] = out.v, out.a
        up = cohort.upload(w=out.theta, relative_to={"w": "w"})  # [K, P]
        self.w = cohort.mean(up.w)

    def step(self, s: Step, batch: Batch) -> None:
        """A batch of the box."""
        vbar = s.state.a * s.state.v + (1 - s.state.a) * s.theta  # [k, P]
        g_w, g_vbar = s.grad(batch), s.grad(batch, rows=vbar)
        if self.adaptive and s.t == 0:
            slope = dot(g_vbar, s.state.v - s.theta)[:, None]  # [k, 1]
        s.descend(g_w)
        s.descend(g_vbar.mul_(s.state.a), name="v", uploaded=False)
        self.buffers.view(s.state.v).copy_(self.buffers.take(vbar))  # into v
        if self.adaptive and s.t == 0:
            s.state.a.copy_((s.state.a - s.lr * slope).clamp(0, 1))

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """a_i v_i + (1 - a_i) w."""
        a = self.a[cohort.ids]
        return a * self.v[cohort.ids] + (1 - a) * cohort.broadcast(w=self.w).w

    def global_row(self) -> Tensor:
        """w."""
        return self.w
