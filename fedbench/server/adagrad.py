"""FedAdagrad: Reddi et al., ICLR 2021, Algorithm 2 with v <- v + Delta^2.

Departs from the paper: nowhere.
"""

from torch import Tensor

from fedbench.core.options import NonNegative, Positive, UnitInterval
from fedbench.server._adaptive import Adaptive


class Adagrad(Adaptive):
    """FedAdagrad.

    Args:
        lr: Server learning rate.
        beta1: Decay of the first moment, in [0, 1).
        tau: Degree of adaptivity, > 0.
        initial_v: Initial second moment.  None: tau^2, as in the paper.
    """

    def __init__(
        self,
        lr: Positive = 0.1,
        beta1: UnitInterval = 0.0,
        tau: Positive = 1e-3,
        initial_v: NonNegative | None = None,
    ):
        super().__init__(lr, beta1, tau, initial_v)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the new second moment v + Delta^2, for the mean change delta of the clients.  # [p]"""
        return v + delta.square()
