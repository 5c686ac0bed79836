"""PGFed's coefficients: the updates of all local steps, made together after the last one.

Luo et al., ICCV 2023, Algorithm 1, the update of a_ij in ClientUpdate.  No other line of a local step reads a_ij.  A
step therefore only records gbar . theta_i, one number a client, and the [K, K'] coefficients are read and written once
a round instead of once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1 << 20  # moves of coefficients held at a time


def coefficients_after(
    alpha: Tensor,
    eta2: float | Tensor,
    c: Tensor,
    gbar_theta: Tensor,
    steps: Tensor,
    alpha_max: float | Tensor | None,
) -> Tensor:
    """`pgfed.coefficient_step` applied for the local steps t = 1 .. steps_i of every client i.  # [K, K']

    alpha [K, K'], at least 0; eta2: a number or [K, 1]; c [K'] or [K, K']; gbar_theta [K, T]; steps [K] float32;
    alpha_max: a number, [K, 1], or None; c has mu in it, as the clients receive it.

    Without an upper bound several steps are one: a_t = max(a_(t-1) - x_t, 0) with X_t = x_1 + ... + x_t unrolls to
    a_T = max(a_0, X_1, ..., X_T) - X_T.  A bound from above has no such form, so its steps are made one at a time.
    """
    at_once = max(1, AT_ONCE // alpha.numel()) if alpha_max is None else 1
    training = torch.arange(gbar_theta.shape[1], device=gbar_theta.device) < steps[:, None]  # [K, T]
    for start in range(0, gbar_theta.shape[1], at_once):
        block = slice(start, start + at_once)
        move = (eta2 * (c + gbar_theta.T[block, :, None])) * training.T[block, :, None]  # [t, K, K']
        X = move.cumsum(0)
        alpha = torch.maximum(alpha, X.amax(0)) - X[-1]
        alpha = alpha if alpha_max is None else alpha.clamp_(max=alpha_max)
    return alpha
