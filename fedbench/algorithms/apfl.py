"""APFL: each client deploys a mixture of a personal model and the global one.

Deng et al., 2020, Algorithm 1.  Each batch, with all right-hand sides evaluated before it:  vbar = a v + (1 - a) w;
w <- w - lr grad f(w);  v <- v - lr a grad f(vbar);  if adaptive, at the first step of a round:
a <- clip(a - lr <v - w, grad f(vbar)>, 0, 1).  A client deploys a v_i + (1 - a) w with the newly aggregated w.
Departs from the paper: aggregation is weighted by samples.  Unless adaptive, a is constant, as in the released code.
BatchNorm buffers of v are updated by the forward passes of the mixture.
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
    """APFL.  w: server model; v_i: personal model of client i; a_i: its weight in the deployed mixture.

    Args:
        alpha: Weight a of the personal model in the mixture, in [0, 1].  A list sets one value per client.
        adaptive: Whether each client learns a, starting from alpha.

    State:
        w: Global model, [P].
        v: Personal models, [N, P].
        a: Mixture weights, [N, 1].
    """

    def __init__(self, alpha: Probability | list[Probability] = 0.5, adaptive: bool = False):
        self.alpha, self.adaptive = per_client(alpha), adaptive

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the global model w [P] and the clients' models v_i to the initial model, and the mixing weights a_i.

        The rows v_i [N, P] and a_i [N, 1] of all clients are stored by `rows`.  a_i is the option alpha.
        """
        self.w = model.init_row()  # [P]
        self.v = rows("v", default=self.w)  # [N, P]; a row equals the default until it is set
        # initial a_i: the option alpha, or if it lists one per client, their mean for new clients  [N, 1]
        self.a = rows("a", default=torch.full_like(self.w[:1], mean(self.alpha)))
        if isinstance(self.alpha, PerClient):
            all_ids = np.arange(federation.num_clients)
            self.a[all_ids] = self.alpha.of(all_ids, self.w.device)  # [N, 1]
        self.statistics = model.trained.rest(model.size)  # columns of running statistics, which are not trained

    def round(self, cohort: Cohort) -> None:
        """Run one round of APFL (Algorithm 1): clients train w and v_i in the same steps, and the server averages w.

        w is the global model, v_i the personal model, and a_i the weight of v_i in the client's mixture of both.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        out = cohort.train(
            w,
            step=self.step,
            # names under which the optimizer states of w and v are stored
            how=LocalTraining(buffers={"theta": "theta", "v": "v"}),
            v=self.v[cohort.ids],
            a=self.a[cohort.ids],
        )
        self.v[cohort.ids], self.a[cohort.ids] = out.v, out.a
        up = cohort.upload(w=out.theta, relative_to={"w": "w"})  # [K, P]; the change of w is sent; w is added again
        self.w = cohort.mean(up.w, updates="w")  # the new w: the mean, or the step of the option server towards it

    def step(self, s: Step, batch: Batch) -> None:
        """Take one local step of w (s.theta) and of v_i (s.state.v), with gradients at w and at the mixture vbar.

        If adaptive, the first step of a round (s.t == 0) also moves the mixture weight a_i (s.state.a).
        """
        vbar = s.state.a * s.state.v + (1 - s.state.a) * s.theta  # the mixture  [k, P]
        g_w, g_vbar = s.grad(batch), s.grad(batch, rows=vbar)  # gradients at w and at the mixture  [k, P] each
        if self.adaptive and s.t == 0:
            slope = dot(g_vbar, s.state.v - s.theta)[:, None]  # derivative of the loss in a_i  [k, 1]
        s.descend(g_w)  # optimizer step of s.theta, which is w
        s.descend(g_vbar.mul_(s.state.a), name="v", uploaded=False)  # v stays with the client
        self.statistics.view(s.state.v).copy_(self.statistics.take(vbar))  # v gets the mixture's running statistics
        if self.adaptive and s.t == 0:
            s.state.a.copy_((s.state.a - s.lr * slope).clamp(0, 1))

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models: mixtures a_i v_i + (1 - a_i) w of personal and server model.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        a = self.a[cohort.ids]
        return a * self.v[cohort.ids] + (1 - a) * cohort.broadcast(w=self.w).w

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
