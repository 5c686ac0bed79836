"""FedYogi: Reddi et al., ICLR 2021, Algorithm 2 with v <- v - (1 - beta2) Delta^2 sign(v - Delta^2).

Departs from the paper: nowhere.
"""

from torch import Tensor

from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server._adaptive import Adaptive


class Yogi(Adaptive):
    """FedYogi.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        beta1: UnitInterval = 0.9,
        beta2: UnitInterval = 0.99,
        tau: Positive = 1e-3,
        initial_v: NonNegative | None = None,
    ):
        super().__init__(lr, beta1, tau, initial_v)
        self.beta2 = beta2

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the new second moment v - (1 - beta2) Delta^2 sign(v - Delta^2).  # [p]

        Args:
            v: The second moment before the round.  # [p]
            delta: The clients' mean change, Delta.  # [p]
        """
        squares = delta.square()
        return v - (1 - self.beta2) * squares * (v - squares).sign()
