"""FedALA: each client learns how much of the server's model to take, element by element, before it trains.

Zhang et al., AAAI 2023, Algorithm 1.  Let h be the last parameter tensors of the model.  With the client's model
theta_i, the server's model w, D = w - theta_i and weights A_i in [0, 1], the client starts from

    w in all columns below h,    theta_i + D A_i in h

A_i descends the loss of this model: on batches of s percent of the client's samples, with gradient g in h,
A_i <- clip(A_i - eta_A g D, 0, 1).  It is one pass per round; the first time passes repeat until the losses of the last
ten have a standard deviation below 0.1.  Then all columns train, and the server averages as FedAvg.
Deployed: the model from which the client would start.
Departs from the released code: s percent of the samples are drawn anew in each round, not a contiguous part.  The first
learning ends after MOST_PASSES passes at the latest.  A client whose model equals w does not learn.
Reduces to: FedAvg with eta_A = 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Columns,
    Federation,
    FlatModel,
    LocalTraining,
    RowStore,
    Step,
)
from fedbench.core.options import Count, Fraction, NonNegative

WINDOW, LARGEST_DEVIATION = 10, 0.1  # a client's first learning ends if its last 10 losses deviate by less than 0.1
MOST_PASSES = 100  # maximum number of passes of the first learning


class FedALA(Algorithm):
    """FedALA.  A_i: weights with which client i mixes its model and the server model w in h, the last parameters.

    Args:
        eta_A: Learning rate of the weights A, >= 0.
        fraction: Fraction s of a client's samples that A learns from, in (0, 1].
        tensors: Number of last parameter tensors in h; 2 is a linear head with bias.
        who: "cohort" initializes the sampled clients; "all" initializes all clients in each round, as PFLlib does.

    State:
        w: Server model, [P].
        theta: Client models, [N, P].  A: Weights, [N, |h|].
    """

    def __init__(
        self,
        eta_A: NonNegative = 1.0,
        fraction: Fraction = 0.8,
        tensors: Count = 2,
        who: Literal["cohort", "all"] = "cohort",
    ):
        self.eta_A, self.fraction, self.tensors, self.who = eta_A, fraction, tensors, who

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server model w [P] and the clients' models theta_i to the initial model, and the weights A_i to 1.

        A_i has a weight for each of the last parameters, by which client i mixes its own values with those of w.
        `rows` stores theta_i [N, P] and A_i [N, |h|].
        """
        # columns (start, stop), without running statistics
        trained = [span for name, span in model.spans.items() if name not in model.buffer_names]
        self.h = Columns(trained[-self.tensors :])  # columns of the last `tensors` parameters, for which A is learned
        self.w = model.init_row()  # [P]
        self.theta = rows("theta", default=self.w)  # [N, P]; a row equals the default until it is set
        self.A = rows("A", default=torch.ones(self.h.size, device=self.w.device))  # [N, |h|], at first the default

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedALA (Algorithm 1): clients learn A_i, train from the mixture, and the server averages.

        A_i are weights in [0, 1], by which client i mixes the server's model w into the last layers h of its own.
        """
        if self.who == "all":  # all clients learn A_i in each round, not only those of the cohort
            everybody = cohort.all_clients()
            self.theta[everybody.ids] = self.start(everybody)  # the mixtures from which clients train
            out = cohort.train(self.theta[cohort.ids])
        else:
            out = cohort.train(self.start(cohort))
        self.theta[cohort.ids] = out.theta
        up = cohort.upload(theta=out.theta, relative_to={"theta": "w"})  # theta - w is sent, and the server adds w
        self.w = cohort.mean(up.theta, updates="w")  # the new w: the mean, or the step of the option server towards it

    def start(self, cohort: Cohort) -> Tensor:
        """Send w to the clients, let them learn A_i, and return the models from which they train.

        Args:
            cohort: The clients.

        Returns:
            w in all columns below h; in the last layers h, theta_i + (w - theta_i) A_i.  # [K, P]
        """
        start, A, learns = self.initialize(cohort, cohort.broadcast(w=self.w).w)
        # a client learned A_i if its model differed from w; learns: [K] bool
        self.A[cohort.ids[learns]] = A[torch.from_numpy(learns).to(A.device)]
        return start

    def initialize(self, cohort: Cohort, w: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
        """Learn the weights A_i, and mix the server's model into each client's.

        h are the columns of the last layers.  Columns outside h are those of w.

        Args:
            cohort: The clients.
            w: The server's model as the clients received it.  # [P]

        Returns:
            The mixed models [K, P], A_i [K, |h|], and whether each client learned A_i [K] bool.
        """
        theta, A = self.theta[cohort.ids], self.A[cohort.ids]  # [K, P], [K, |h|]
        D = self.h.take(w) - self.h.take(theta)  # [K, |h|]
        differs = (theta != w).any(1).cpu().numpy()  # [K]; a client whose model is w has nothing to learn
        is_first = ~self.A.has(cohort.ids).cpu().numpy()  # clients that never learned A  [K]
        A = self.learn(cohort, w, A, D, differs & ~is_first, passes=1)
        # the first time: MOST_PASSES = 100 passes, or until it converges
        A = self.learn(cohort, w, A, D, differs & is_first, passes=MOST_PASSES)
        return self.h.put(w.expand(len(cohort), -1), self.h.take(theta) + D * A), A, differs

    def learn(self, cohort: Cohort, w: Tensor, A: Tensor, D: Tensor, learns: np.ndarray, passes: int) -> Tensor:
        """Train the weights A_i of some clients, until their losses are constant or all passes are done.

        Args:
            cohort: The clients.
            w: The server's model.  # [P]
            A: The weights from which training starts.  # [K, |h|]
            D: w - theta_i in h.  # [K, |h|]
            learns: Which clients learn.  # [K] bool, host
            passes: Largest number of passes.

        Returns:
            The weights.  # [K, |h|]
        """
        A, learns = A.clone(), learns.copy()
        subset = cohort.subsample("train", self.fraction, key="ala")  # each client's random samples for A
        losses = np.zeros((len(cohort), 0))  # of the last batch of each pass  [K, passes]
        for n in range(passes):
            if not learns.any():
                break
            where = torch.from_numpy(np.flatnonzero(learns)).to(w.device)  # positions of the clients that still learn
            how = LocalTraining(
                # drop_last=False: train on the last batch even if it is smaller; uploaded=False: the weights A_i stay
                # with the client; key: of the random batches; throughput_weight=0: images/s count each sample once
                epochs=1,
                drop_last=False,
                split=subset,
                key=f"ala/{n}",
                uploaded=False,
                throughput_weight=0.0,
            )
            out = cohort.subset(learns).train(
                w,
                step=self.step,
                columns=self.h,
                how=how,
                A=A[where],
                D=D[where],
                last_loss=w.new_zeros(len(where)),
            )
            A[where] = out.A
            losses = np.concatenate([losses, np.zeros((len(cohort), 1))], 1)
            losses[learns, -1] = out.last_loss.cpu().numpy()
            # a client stops when the standard deviation of its last WINDOW = 10 losses is below LARGEST_DEVIATION = 0.1
            if n + 1 > WINDOW:
                learns &= losses[:, -WINDOW:].std(1) >= LARGEST_DEVIATION
        return A

    def step(self, s: Step, batch: Batch) -> None:
        """Take one gradient step on the weights A_i; the models do not change.

        The loss is that of the mixed model, whose columns h are theta_i + D A_i = w - D (1 - A_i).

        Args:
            s: The step of k clients: s.theta is w, s.state.A the weights, s.state.D the differences w - theta_i in h.
            batch: One batch of every client.
        """
        A, D = s.state.A, s.state.D  # [k, |h|]
        loss_before = s.summed_loss.clone()  # sum of the losses of earlier batches  [k]
        mixed = self.h.put(s.theta, self.h.take(s.theta) - D * (1 - A))  # [k, P]
        g = self.h.take(s.grad(batch, rows=mixed))  # [k, |h|]
        A.copy_((A - self.eta_A * g * D).clamp(0, 1))  # eta_A: learning rate of A
        s.state.last_loss.copy_(s.summed_loss - loss_before)  # loss of this batch, which `learn` reads  [k]

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: those from which the clients would train next.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        models, _, _ = self.initialize(cohort, cohort.broadcast(w=self.w).w)
        return models

    def global_row(self) -> Tensor:
        """Return the server model w.  # [P]"""
        return self.w
