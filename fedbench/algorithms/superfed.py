"""SuPerFed: each client trains a federated and a local model so that all interpolations between them perform well.

Hahn et al., KDD 2022.  w_f starts from the received w.  w_l is personal and initialized independently by each client.
For every batch, lambda ~ U(0, 1), and w_f and w_l take a gradient step on
    f(W) + mu ||w_f - w||^2 + nu cos^2(w_f, w_l),   W = (1 - lambda) w_f + lambda w_l;
then w <- sum_i n_i w_f,i / n.  Before round floor(start R) only w_f trains: lambda = 0, without the cosine.
Clients deploy (1 - lambda) w + lambda w_l.
Departs from the released code: the norm is squared, as in the paper (there, a sum of unsquared norms, one per tensor);
lambda is selected on held-out training samples (there, on the test split).
BatchNorm has one set of running statistics per client, those of the mixture.
Reduces to: FedAvg before the start, at mu = 0.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Batch, Cohort, Federation, FlatModel, LocalTraining, RowStore, Step
from fedbench.core.options import NonNegative, Probability, UnitInterval

GRID = [number / 10 for number in range(11)]  # candidate values of lambda


class SuPerFed(Algorithm):
    """SuPerFed.  w_f: federated model; w_l: personal model; lambda mixes them; mu, nu: weights of both penalties.

    Args:
        mu: Weight of ||w_f - w||^2, >= 0.
        nu: Weight of cos^2(w_f, w_l), >= 0.
        start: Fraction of the rounds after which both models train, in [0, 1].
        mode: Whether a batch draws one lambda for the "model" or one for each "layer".
        mixture: Deployed lambda: a number in [0, 1], or "held" for the best of 0, 0.1 .. 1 on held-out samples.
        held_out: Fraction of the training samples that is held out with mixture="held".

    State:
        w: Global model, [P].
        wl: Local models, [N, P].
    """

    def __init__(
        self,
        mu: NonNegative = 0.01,
        nu: NonNegative = 2.0,
        start: Probability = 0.2,
        mode: Literal["model", "layer"] = "model",
        mixture: Probability | Literal["held"] = "held",
        held_out: UnitInterval = 0.2,
    ):
        self.mu, self.nu, self.start, self.mode, self.mixture = mu, nu, start, mode, mixture
        self.held_out = held_out

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the global model w [P] to the initial model, and create the store of the clients' local models w_l.

        A client draws a random w_l [P] when it first needs it.  With mixture="held", also hold out training samples.
        """
        self.w = model.init_row()  # [P]
        self.wl = rows("wl", default=self.w)  # [N, P], at first the default, only of clients that trained w_l
        self.trained = model.trained  # columns of parameters
        self.statistics = model.trained.rest(model.size)  # columns of running statistics
        layers = {name.rpartition(".")[0]: None for name in model.spans}  # names of the layers, in order
        number = {name: i for i, name in enumerate(layers)}  # number of each layer
        self.layer = torch.zeros(model.size, dtype=torch.int64, device=model.device)  # layer of each column  [P]
        for name, (a, b) in model.spans.items():
            self.layer[a:b] = number[name.rpartition(".")[0]] if self.mode == "layer" else 0
        self.draws = len(layers) if self.mode == "layer" else 1  # of lambda in each local step of a client
        if self.mixture == "held":
            federation.hold_out(self.held_out)  # splits "remaining" and "held_out"

    def local_models(self, cohort: Cohort) -> Tensor:
        """Return each client's personal model w_l.  # [K, P]

        Of a client that has not trained it yet, return random initial values, which depend on the client's id.
        """
        wl, is_new = self.wl[cohort.ids], ~self.wl.has(cohort.ids)
        if bool(is_new.any()):
            wl[is_new] = cohort.model.init_rows(cohort.ids[is_new.cpu().numpy()], "superfed")
        return wl

    def mixes(self, cohort: Cohort) -> bool:
        """Return whether both models train in the cohort's round.

        Before the fraction `start` of all rounds has passed, only w_f trains."""
        return cohort.round >= int(self.start * cohort.rounds + 1e-9)  # in floats, 0.29 * 100 is less than 29

    def round(self, cohort: Cohort) -> None:
        """Run one round of SuPerFed: clients train w_f and w_l, and the server averages w_f.

        w_f is the federated model, which starts from w, and w_l the personal one.  Their random mixtures are trained.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        split = "remaining" if self.mixture == "held" else "train"  # "held": the other samples select lambda
        if self.mixes(cohort):  # both models train; before the option start, w_f only
            # names of the optimizer states of w_f and w_l
            how = LocalTraining(split=split, buffers={"theta": "theta", "wl": "wl"})
            out = cohort.train(w, step=lambda s, batch: self.step(s, batch, w), how=how, wl=self.local_models(cohort))
            self.wl[cohort.ids] = out.wl
        else:
            pull = (lambda s: 2 * self.mu * (s.theta - w)) if self.mu else None  # gradient of mu ||w_f - w||^2
            out = cohort.train(w, extra_grad=pull, how=LocalTraining(split=split))
        up = cohort.upload(w=out.theta, relative_to={"w": "w"})  # [K, P]; the change of w is sent; w is added again
        self.w = cohort.mean(up.w, updates="w")  # the new w: the mean, or the step of the option server towards it

    def step(self, s: Step, batch: Batch, w: Tensor) -> None:
        """Take one gradient step on w_f (s.theta) and w_l (s.state.wl), both at their values before the step.

        Args:
            s: The step.
            batch: One batch of every client.
            w: The received global model.  # [P]
        """
        # one lambda per model or layer [k, draws], repeated for each of its columns  [k, P]
        lam = s.rng.uniform(self.draws)[:, self.layer].to(s.theta)
        W = s.theta.lerp(s.state.wl, lam)  # the mixture  [k, P]
        g = s.grad(batch, rows=W)  # [k, P]
        cos_f, cos_l = self.cosine_gradients(s.theta, s.state.wl)  # of a penalty on their squared cosine  [k, P] each
        g_f = (1 - lam) * g + 2 * self.mu * (s.theta - w) + self.nu * cos_f
        g_l = lam * g + self.nu * cos_l
        s.descend(g_f)
        s.descend(g_l, name="wl", uploaded=False)  # w_l stays with the client
        for rows in (s.theta, s.state.wl):
            self.statistics.view(rows).copy_(self.statistics.take(W))  # both get the mixture's running statistics

    def cosine_gradients(self, f: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
        """Return the gradients of cos^2(f, l), the squared cosine of two models, in f and in l.

        The gradient in f is 2 cos (l / (|f| |l|) - cos f / |f|^2); for that in l, f and l are exchanged.

        Args:
            f: Federated models w_f.  # [k, P]
            l: Local models w_l.  # [k, P]

        Returns:
            Both gradients, 0 in columns that are not trained.  # [k, P] each
        """
        rows = [self.trained.take(t) for t in (f, l)]
        norms = [t.norm(dim=1, keepdim=True).clamp_min(1e-12) for t in rows]  # a row of zeros has gradient 0  [k, 1]
        unit = [t / norm for t, norm in zip(rows, norms)]  # f / |f| and l / |l|
        cos = (unit[0] * unit[1]).sum(1, keepdim=True)  # [k, 1]
        return tuple(  # type: ignore[return-value]
            self.trained.put(torch.zeros_like(f), 2 * cos * (other - cos * this) / norm)
            for norm, this, other in zip(norms, unit, reversed(unit))
        )

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: (1 - lambda) w + lambda w_l.

        lambda is the option mixture, or with "held" each client's best of 0, 0.1 .. 1 on its held-out samples.
        `final`, whether the last round is over, changes nothing.

        Returns:
            The models [K, P]; before w_l trains, w [P] for all clients.
        """
        w = cohort.broadcast(w=self.w).w  # as the clients receive it  [P]
        if not self.mixes(cohort):  # before the option start, only w_f trains
            return w
        w, wl = w.expand(len(cohort), -1), self.local_models(cohort)
        if self.mixture != "held":
            return w.lerp(wl, self.mixture)
        losses = torch.stack([cohort.loss(w.lerp(wl, lam), split="held_out") for lam in GRID], 1)  # [K, 11]
        best = losses.nan_to_num(float("inf")).argmin(1)  # lambda = 0 for a client without held-out samples
        return w.lerp(wl, (best / 10)[:, None])  # GRID: 0, 0.1 ... 1

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
