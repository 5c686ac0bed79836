"""SuPerFed: two models of each client, a federated and a local one, trained so that all models between them are good.

Hahn et al., KDD 2022.  w_f starts from the received w, w_l stays with the client; each client initializes it
independently, with its number among the seeds.
Every batch draws lambda ~ U(0, 1) and descends on
    f(W) + mu ||w_f - w||^2 + nu cos^2(w_f, w_l),   W = (1 - lambda) w_f + lambda w_l,
in w_f and w_l; w <- sum_i n_i w_f,i / n.  Before round floor(start R) w_f trains alone: lambda = 0 and no cosine.
Clients deploy (1 - lambda) w + lambda w_l.
Departs from the released code: the norm is squared, as in the paper (there one of each tensor, unsquared); lambda is
chosen on samples held out of the training part (there on the test split, which leaks test labels).
Batch norm has one set of running statistics for each client, those of the mixture.
Reduces to: FedAvg before the start, at mu = 0.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, RowStore, Step
from fedbench.core.options import NonNegative, Probability, Share

GRID = [number / 10 for number in range(11)]  # of lambda


class SuPerFed(Algorithm):
    """mu, nu, start, mode, mixture, held_out: above and in the YAML.

    State: w [P]; wl [N, P].
    """

    def __init__(
        self,
        mu: NonNegative = 0.01,
        nu: NonNegative = 2.0,
        start: Probability = 0.2,
        mode: Literal["model", "layer"] = "model",
        mixture: Probability | Literal["held"] = "held",
        held_out: Share = 0.2,
    ):
        self.mu, self.nu, self.start, self.mode, self.mixture = mu, nu, start, mode, mixture
        self.held_out = held_out

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Initialize w; initial rows of w_l are drawn when a client first needs them."""
        self.w = model.init_row()  # [P]
        self.wl = rows("wl", default=self.w)  # lazy [N, P], for clients that trained it
        self.trained, self.buffers = model.trained, model.trained.rest(model.size)
        layers = {name.rpartition(".")[0]: None for name in model.spans}
        number = {name: i for i, name in enumerate(layers)}
        self.layer = torch.zeros(model.size, dtype=torch.int64, device=model.device)  # of each column  [P]
        for name, (a, b) in model.spans.items():
            self.layer[a:b] = number[name.rpartition(".")[0]] if self.mode == "layer" else 0
        self.draws = len(layers) if self.mode == "layer" else 1
        if self.mixture == "held":
            federation.hold_out(self.held_out)  # splits "kept" and "held"

    def local_models(self, cohort: Cohort) -> Tensor:
        """Return w_l of each client.  # [K, P]"""
        wl, is_new = self.wl[cohort.ids], ~self.wl.has(cohort.ids)
        if bool(is_new.any()):
            wl[is_new] = cohort.model.init_rows(cohort.ids[is_new.cpu().numpy()], "superfed")
        return wl

    def mixes(self, cohort: Cohort) -> bool:
        """Whether the round is one in which both models train."""
        return cohort.round >= int(self.start * cohort.rounds + 1e-9)  # 0.29 * 100 is less than 29

    def round(self, cohort: Cohort) -> None:
        """w_f and w_l train, w_f is sent."""
        w = cohort.broadcast(w=self.w).w
        split = "kept" if self.mixture == "held" else "train"
        if self.mixes(cohort):
            how = LocalTraining(split=split, buffers={"theta": "theta", "wl": "wl"})
            out = cohort.train(w, step=lambda s, batch: self.step(s, batch, w), how=how, wl=self.local_models(cohort))
            self.wl[cohort.ids] = out.wl
        else:
            near = (lambda s: 2 * self.mu * (s.theta - w)) if self.mu else None
            out = cohort.train(w, extra_grad=near, how=LocalTraining(split=split))
        up = cohort.upload(w=out.theta, relative_to={"w": "w"})  # [K, P]
        self.w = cohort.mean(up.w)

    def step(self, s: Step, batch: Batch, w: Tensor) -> None:
        """A batch, all at the values before it."""
        lam = s.rng.uniform(self.draws)[:, self.layer].to(s.theta)  # [k, P]
        W = s.theta.lerp(s.state.wl, lam)
        g = s.grad(batch, rows=W)  # [k, P]
        cos_f, cos_l = self.cosine_gradients(s.theta, s.state.wl)
        g_f = (1 - lam) * g + 2 * self.mu * (s.theta - w) + self.nu * cos_f
        g_l = lam * g + self.nu * cos_l
        s.descend(g_f)
        s.descend(g_l, name="wl", uploaded=False)
        for rows in (s.theta, s.state.wl):
            self.buffers.view(rows).copy_(self.buffers.take(W))  # what the mixture saw

    def cosine_gradients(self, f: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
        """Gradients of cos^2(f, l) over the trained columns: 2 cos (l / (|f| |l|) - cos f / |f|^2).  # [k, P] each"""
        rows = [self.trained.take(t) for t in (f, l)]
        sizes = [t.norm(dim=1, keepdim=True).clamp_min(1e-12) for t in rows]  # of a row of zeros: no pull  [k, 1]
        unit = [t / size for t, size in zip(rows, sizes)]
        cos = (unit[0] * unit[1]).sum(1, keepdim=True)  # [k, 1]
        return tuple(  # type: ignore[return-value]
            self.trained.put(torch.zeros_like(f), 2 * cos * (other - cos * own) / size)
            for size, own, other in zip(sizes, unit, reversed(unit))
        )

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """(1 - lambda) w + lambda w_l; before the start w."""
        w = cohort.broadcast(w=self.w).w
        if not self.mixes(cohort):
            return w
        w, wl = w.expand(len(cohort), -1), self.local_models(cohort)
        if self.mixture != "held":
            return w.lerp(wl, self.mixture)
        losses = torch.stack([cohort.loss(w.lerp(wl, lam), "held") for lam in GRID], 1)  # [K, 11]
        best = losses.nan_to_num(float("inf")).argmin(1)  # a client without held samples: w
        return w.lerp(wl, (best / 10)[:, None])

    def global_row(self) -> Tensor:
        """w."""
        return self.w
