"""FedExP: Jhunjhunwala, Wang and Joshi, ICLR 2023: the server extrapolates along the mean change.

With Delta_i = w - theta_i, its mean Delta and p_i = 1 / K:

    eta_g = max(1, sum_i p_i |Delta_i|^2 / (2 (|Delta|^2 + eps)))
    w <- w - eta_g Delta

Departs from the paper: p_i are the weights of the mean, as in the released code.  client_weights=uniform is the paper.
Reduces to: the mean if all uploads are equal.
"""

from torch import Tensor

from fedbench.core.options import NonNegative
from fedbench.server.base import ServerRule, ServerStep


class Extrapolation(ServerRule):
    """Extrapolation by FedExP.

    Args:
        eps: Added to the squared norm of the mean change, >= 0.
    """

    def __init__(self, eps: NonNegative = 1e-3):
        self.eps = eps

    def step(self, s: ServerStep, state: dict[str, Tensor]) -> Tensor:
        """Return the server's new parameters w + eta_g delta, for the clients' mean change delta.  # [p]

        The argument ``state`` is not used.
        """
        return s.w + self.server_lr(s) * s.delta

    def server_lr(self, s: ServerStep) -> Tensor:
        """Return FedExP's step size eta_g >= 1; 1 if the quotient is undefined (mean change and eps are 0).  # []"""
        squares = (s.uploads - s.w).square().sum(1)  # |Delta_i|^2  [K]
        # the mean of |Delta_i|^2, with p_i = weights[i]
        ratio = (s.weights @ squares) / (2 * (s.delta.square().sum() + self.eps))
        return ratio.nan_to_num(1.0, posinf=1.0).clamp_min(1.0)
