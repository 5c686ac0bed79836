"""L2GD: clients take local steps and, now and then, all move towards the mean of their models.

Hanzely and Richtarik, "Federated Learning of a Mixture of Global and Local Models", 2020, Algorithm 1, for
(1/N) sum_i f_i(x_i) + lam/(2N) sum_i ||x_i - xbar||^2.  Every iteration all clients flip one coin:  with probability
1 - pr  x_i <- x_i - alpha/(N (1 - pr)) grad f_i(x_i);  with probability pr  x_i <- (1 - c) x_i + c xbar,
c = alpha lam/(N pr).  Nothing is sent but where an averaging step follows local ones.
A round here is a run of local steps, whose number is geometric with mean (1 - pr)/pr, and the averaging step behind it.
A round without local steps sends nothing up.  It sends nothing down if its clients know xbar from their last averaging
step, which leaves xbar unchanged.  With full participation that is always the case.
Departs from the paper: stochastic gradients; a run of local steps ends after local.epochs at the latest; c is an
option and not made of lam; with partial participation xbar is the mean over the cohort.
Reduces to: Local at mix = 0, at equal steps; every x_i is xbar at mix = 1.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.core.options import Probability, require


class L2GD(Algorithm):
    """pr, mix (c): see the header; optimizer.lr is alpha / (N (1 - pr)).  steps: whether the number of local steps of a
    round is drawn or that of local.epochs.

    State: x [N, P], the models of clients; sent [N, P], the server's copy of x; knows [N], the clients that know
    their mean (None: all).
    """

    def __init__(
        self,
        pr: Probability = 0.2,
        mix: Probability = 0.5,
        steps: Literal["drawn", "epochs"] = "drawn",
    ):
        require(pr > 0, f"algorithm.pr={pr:g}: with no averaging step a round would never end; choose one in (0, 1]")
        self.pr, self.mix, self.steps = pr, mix, steps

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """All clients start from one model."""
        w = model.init_row()  # [P]
        self.x, self.sent = rows("x", default=w), rows("sent", default=w)  # lazy [N, P]
        self.knows: Tensor | None = None

    def round(self, cohort: Cohort) -> None:
        """A run of local steps, then (1 - c) x_i + c xbar."""
        how = LocalTraining(steps=self.run_length(cohort) if self.steps == "drawn" else None)
        these = torch.zeros(cohort.num_clients, dtype=torch.bool)  # on the host
        these[torch.from_numpy(cohort.ids)] = True
        is_known = how.steps == 0 and (bool(these.all()) if self.knows is None else torch.equal(self.knows, these))
        x = cohort.train(self.x[cohort.ids], how=how).theta  # [K, P]
        sent = self.sent[cohort.ids]  # [K, P]
        if how.steps != 0:
            sent = cohort.upload(x=x, replaces={"x": sent}).x
        xbar = cohort.sum(sent) / len(cohort)  # [P]
        if not is_known:
            seen = cohort.broadcast(xbar=xbar).xbar  # read by clients, which also know `sent`
            self.knows = these & torch.equal(seen, xbar)
            xbar = seen
        self.x[cohort.ids], self.sent[cohort.ids] = x.lerp(xbar, self.mix), sent.lerp(xbar, self.mix)

    def run_length(self, cohort: Cohort) -> int:
        """T, of P(T = t) = pr (1 - pr)^t, no more than the client with most has in local.epochs."""
        before = int(cohort.generator("l2gd").geometric(self.pr)) - 1
        return min(before, cohort.max_local_steps)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """x_i."""
        return self.x[cohort.ids]
