"""Adaptive server rules: Reddi et al., ICLR 2021, Algorithm 2.

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
    """Base class of Adagrad, Adam and Yogi.

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
        """Return the new second moment.  # [p]"""
        raise NotImplementedError

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Return w after one adaptive step.  # [p]"""
        m = self.beta1 * state["m"] + (1 - self.beta1) * s.delta  # [p]
        v = self.second_moment(state["v"], s.delta)  # [p]
        state["m"], state["v"] = m, v
        return s.w + self.rate(s.round) * m / (v.sqrt() + self.tau)

    def rate(self, round: int) -> float:
        """Return the server learning rate of a round, from 0."""
        return self.lr


BiasCorrection = Literal["none", "flower"]


def flower_correction(round: int, beta1: float, beta2: float) -> float:
    """Return the factor of the learning rate in Flower's FedAdam.

    Its exponent is one higher than in Adam: round + 2 in the round counted from 0.
    """
    t = round + 2
    return math.sqrt(1 - beta2**t) / (1 - beta1**t)
