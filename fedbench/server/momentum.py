"""Server momentum (FedAvgM): Hsu, Qi and Brown, arXiv 1909.06335, 2019.

With d = w - mean:  v <- beta v + d,  w <- w - lr v,  or with Nesterov momentum  w <- w - lr (d + beta v).
Reduces to: the mean with beta = 0 and lr = 1.
"""

from torch import Tensor

from fedbench.core.options import Positive, UnitInterval
from fedbench.server.base import ServerRule, ServerStep


class Momentum(ServerRule):
    """Server momentum.

    Args:
        beta: Momentum, in [0, 1).
        lr: Server learning rate.
        nesterov: Whether to use Nesterov momentum.

    State:
        v: Momentum buffer, [p].
    """

    states = {"v": 0.0}

    def __init__(self, beta: UnitInterval = 0.9, lr: Positive = 1.0, nesterov: bool = False):
        self.beta, self.lr, self.nesterov = beta, lr, nesterov

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Take one step of server momentum along the clients' mean change: v <- beta v + d;  w <- w - lr v.

        d = w - mean.  With Nesterov momentum, w <- w - lr (d + beta v).

        Args:
            s: The old parameters, and the mean of the uploads.  # [p] each
            state: The momentum buffer "v" [p], which is replaced by the new one.

        Returns:
            The server's new parameters.  # [p]
        """
        d = s.w - s.mean  # minus the mean change, in place of a gradient  [p]
        v = self.beta * state["v"] + d  # [p]
        state["v"] = v
        return s.w - self.lr * (d + self.beta * v if self.nesterov else v)
