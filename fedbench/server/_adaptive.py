"""Adaptive rules for the server's update (FedOpt): Reddi et al., ICLR 2021, Algorithm 2.

With Delta = mean - w:

    m <- beta1 m + (1 - beta1) Delta
    v <- second moment of Delta, by Adagrad, Adam or Yogi
    w <- w + lr m / (sqrt(v) + tau)
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server.base import ServerRule, ServerStep


class Adaptive(ServerRule):
    """Base class of Adagrad, Adam and Yogi, which differ in the second moment; tau: degree of adaptivity.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        tau: Degree of adaptivity, > 0.  Larger values adapt less.
        initial_v: Initial second moment.  None: tau^2, as in the paper.

    State:
        m: First moment, [p].
        v: Second moment, [p].
    """

    def __init__(self, lr: Positive, beta1: UnitInterval, tau: Positive, initial_v: NonNegative | None):
        self.lr, self.beta1, self.tau = lr, beta1, tau
        self.states = {"m": 0.0, "v": tau**2 if initial_v is None else initial_v}

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the new second moment.  Subclasses must implement it.

        Args:
            v: The second moment before the round.  # [p]
            delta: The mean change of the clients, Delta.  # [p]

        Returns:
            The second moment v of this round.  # [p]
        """
        raise NotImplementedError

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Take one adaptive step: w plus the learning rate times m / (sqrt(v) + tau).

        Args:
            s: The old parameters w [p], and the mean change delta of the clients [p].
            state: Moments "m" and "v" [p], which are replaced by the new ones.

        Returns:
            The server's new parameters.  # [p]
        """
        m = self.beta1 * state["m"] + (1 - self.beta1) * s.delta  # first moment, a running mean of Delta  [p]
        v = self.second_moment(state["v"], s.delta)  # [p]
        state["m"], state["v"] = m, v
        # rate: lr, in subclasses perhaps with a bias correction
        return s.w + self.rate(s.round) * m / (v.sqrt() + self.tau)

    def rate(self, round: int) -> float:
        """Return the server learning rate: `lr` in every round.  Subclasses may let it depend on `round`, from 0."""
        return self.lr


BiasCorrection = Literal["none", "flower"]


def flower_correction(round: int, beta1: float, beta2: float) -> float:
    """Return Adam's bias correction as a factor of the learning rate, as Flower's FedAdam computes it.

    Args:
        round: The round, from 0.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
    """
    t = round + 2  # Flower counts rounds from 1 and adds 1; Adam's t would be round + 1
    return math.sqrt(1 - beta2**t) / (1 - beta1**t)
