"""FedAdam: Reddi et al., ICLR 2021, Algorithm 2 with v <- beta2 v + (1 - beta2) Delta^2.

Departs from the paper: nowhere.  bias_correction=flower is the rule of Flower's FedAdam, which is another method.
"""

from torch import Tensor

from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server._adaptive import Adaptive, BiasCorrection, flower_correction


class Adam(Adaptive):
    """FedAdam.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
        bias_correction: "none", as in the paper, or "flower".
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        beta1: UnitInterval = 0.9,
        beta2: UnitInterval = 0.99,
        tau: Positive = 1e-3,
        initial_v: NonNegative | None = None,
        bias_correction: BiasCorrection = "none",
    ):
        super().__init__(lr, beta1, tau, initial_v)
        self.beta2, self.bias_correction = beta2, bias_correction

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the new second moment beta2 v + (1 - beta2) Delta^2, for the clients' mean change delta.  # [p]"""
        return self.beta2 * v + (1 - self.beta2) * delta.square()

    def rate(self, round: int) -> float:
        """Return the server learning rate `lr`, multiplied by Flower's bias correction for `round` (from 0) if set."""
        has_correction = self.bias_correction == "flower"
        return self.lr * (flower_correction(round, self.beta1, self.beta2) if has_correction else 1.0)
