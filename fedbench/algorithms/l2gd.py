"""L2GD: random alternation of local gradient steps and averaging steps towards the mean model.

Hanzely and Richtarik, "Federated Learning of a Mixture of Global and Local Models", 2020, Algorithm 1, for
(1/N) sum_i f_i(x_i) + lam/(2N) sum_i ||x_i - xbar||^2.  In every iteration one coin decides for all clients:
with probability 1 - pr  x_i <- x_i - alpha/(N (1 - pr)) grad f_i(x_i);
with probability pr  x_i <- (1 - c) x_i + c xbar,  c = alpha lam/(N pr).
Only an averaging step that follows a local step communicates.
A round here is a run of local steps, whose number is geometric with mean (1 - pr)/pr, and the averaging step after it.
A round without local steps has no upload.  It has no download if its clients have xbar from their last averaging step,
which leaves xbar unchanged.  This is always so with full participation.
Departs from the paper: stochastic gradients; at most local.epochs epochs of local steps in a round; c is an option
(mix) instead of lam; with partial participation xbar is the mean over the cohort.
Reduces to: Local at mix = 0, with equal steps; every x_i is xbar at mix = 1.
"""

from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore
from fedbench.core.options import Probability, require


class L2GD(Algorithm):
    """L2GD.  x_i: model of client i; uploaded: x_i as the server has it; optimizer.lr is alpha / (N (1 - pr)).

    Args:
        pr: Probability of an averaging step, in (0, 1].
        mix: Step size c of an averaging step, in [0, 1].
        steps: Local steps in a round: "drawn" from the geometric distribution, or those of local.epochs ("epochs").

    State:
        x: Client models, [N, P].
        uploaded: Client models as the server has them, [N, P].
        knows: Which clients have xbar, the mean of their models, [N] bool; None before the first round: all.
    """

    def __init__(
        self,
        pr: Probability = 0.2,
        mix: Probability = 0.5,
        steps: Literal["drawn", "epochs"] = "drawn",
    ):
        require(
            pr > 0,
            f"algorithm.pr={pr:g} must be in (0, 1], because a round ends with an averaging step, which would never "
            "come: set it to a probability above 0, such as 0.2",
        )
        self.pr, self.mix, self.steps = pr, mix, steps

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the clients' models x_i, as last trained and as last uploaded, to the initial model.  # [N, P] each

        Both are stored by `rows`.
        """
        w = model.init_row()  # [P]
        self.x, self.uploaded = rows("x", default=w), rows("sent", default=w)  # [N, P], at first the default
        self.knows: Tensor | None = None  # which clients have the last xbar  [N] bool; None before the first round

    def round(self, cohort: Cohort) -> None:
        """Run one round of L2GD: a random number of local steps, then the averaging step (1 - c) x_i + c xbar.

        x_i is the model of client i, xbar the mean of the cohort's models, and c the option mix.
        """
        # None: the run's local.epochs
        how = LocalTraining(steps=self.run_length(cohort) if self.steps == "drawn" else None)
        members = torch.zeros(cohort.num_clients, dtype=torch.bool)  # which clients take part, on the host  [N]
        members[torch.from_numpy(cohort.ids)] = True
        # knows: the clients that have the last xbar; None, before the first round: all
        # have_mean: whether these are exactly the cohort
        have_mean = bool(members.all()) if self.knows is None else torch.equal(self.knows, members)
        needs_download = how.steps != 0 or not have_mean  # False if xbar has not changed since they got it
        x = cohort.train(self.x[cohort.ids], how=how).theta  # [K, P]
        uploaded = self.uploaded[cohort.ids]  # [K, P]
        if how.steps != 0:
            uploaded = cohort.upload(x=x, previous={"x": uploaded}).x  # the change since the last upload is sent
        xbar = cohort.sum(uploaded) / cohort.mean_size  # mean_size: K, or with privacy=central its expected value  [P]
        if needs_download:
            received = cohort.broadcast(xbar=xbar).xbar  # differs from xbar if the download is lossy
            self.knows = members & torch.equal(received, xbar)  # nobody, if it is lossy
            xbar = received
        # the averaging step of the clients, and the same of the server for its versions of their models
        self.x[cohort.ids], self.uploaded[cohort.ids] = x.lerp(xbar, self.mix), uploaded.lerp(xbar, self.mix)

    def run_length(self, cohort: Cohort) -> int:
        """Draw the number T of local steps of this round, for all clients together.

        Args:
            cohort: The clients, whose max_local_steps is the largest possible result.

        Returns:
            T with P(T = t) = pr (1 - pr)^t; larger numbers than max_local_steps become this.
        """
        num_steps = int(cohort.generator("l2gd").geometric(self.pr)) - 1  # before the first averaging step
        return min(num_steps, cohort.max_local_steps)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort, the client models x_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.x[cohort.ids]
