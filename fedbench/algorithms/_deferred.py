"""PGFed's coefficient updates, applied once after all local steps of a round.

Luo et al., ICCV 2023, Algorithm 1, the update of a_ij in ClientUpdate.  No other line of a local step reads a_ij.  So a
step only records the scalar gbar . theta_i of each client, and the [K, K'] coefficients are updated once per round.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1 << 20  # maximum number of entries of a block [t, K, K']


def coefficients_after(
    alpha: Tensor,
    eta2: float | Tensor,
    c: Tensor,
    gbar_theta: Tensor,
    steps: Tensor,
    alpha_max: float | Tensor | None,
) -> Tensor:
    """Update the coefficients a_ij by all local steps t = 1 .. T of a round.

    Step t is a_t = max(a_(t-1) - x_t, 0), for each a = a_ij, with x_t = eta2 (c_j + gbar . theta_i at step t).  After a
    client's last step x_t = 0.  Without an upper bound several steps are computed at once: with X_t = x_1 + ... + x_t,
    a_T = max(a_0, X_1, ..., X_T) - X_T.  With an upper bound there is no such form, so steps are taken one at a time.

    K clients i train, and K' clients j uploaded before.  f_j is the local objective of client j, theta_i the model of
    client i, and gbar the mean of the gradients of all f_j multiplied by mu, which the server sent.

    Args:
        alpha: Coefficients a_ij before the round, >= 0.  # [K, K']
        eta2: Learning rate of the coefficients, a number or [K, 1].
        c: Constants c_j of the linear models of f_j as clients receive them, multiplied by mu.  # [K'] or [K, K']
        gbar_theta: Recorded scalar products gbar . theta_i.  # [K, T]
        steps: Number of local steps of each client, float32.  # [K]
        alpha_max: Upper bound, a number, [K, 1] or None.

    Returns:
        Coefficients after the round.  # [K, K']
    """
    # steps in a block [t, K, K'], which has at most AT_ONCE entries to limit memory
    at_once = max(1, AT_ONCE // alpha.numel()) if alpha_max is None else 1
    still_trains = torch.arange(gbar_theta.shape[1], device=gbar_theta.device) < steps[:, None]  # [K, T]
    for start in range(0, gbar_theta.shape[1], at_once):
        block = slice(start, start + at_once)
        x = (eta2 * (c + gbar_theta.T[block, :, None])) * still_trains.T[block, :, None]  # [t, K, K']
        X = x.cumsum(0)
        alpha = torch.maximum(alpha, X.amax(0)) - X[-1]
        alpha = alpha if alpha_max is None else alpha.clamp_(max=alpha_max)
    return alpha
