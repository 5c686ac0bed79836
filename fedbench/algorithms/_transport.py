"""Partial entropic optimal transport for many small problems at once, by Sinkhorn's algorithm.

    min <T, 1 - sim> + eps sum T (log T - 1)   where every column of T sums to mass / J, and every row to at most 1 / M

(FedOTP's "COT": Li et al., CVPR 2024).  T = diag(u) K diag(v) with K = exp((sim - 1) / eps), starting at u = 1:
v <- mass / J / (K^T u);   u <- min(1 / M / (K v), 1).

At eps = 0.01, K leaves the range of float32, so u and v are stored as logarithms, f and g.  Only the first of every
CHECK iterations is in the log domain.  It gives a plan with entries in [0, mass / J].  The other iterations scale the
rows and columns of this plan, which is faster.  u is decreasing, so the factors of the rows are at most 1.

POT solves partial problems one at a time, and its batched Sinkhorn solves balanced problems only.

Letters: A clients, J columns (prompts), n problems (of all clients), M rows (image tokens).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHECK = 10  # iterations between convergence checks, each of which synchronizes with a GPU


@torch.no_grad()
def plan(sim: Tensor, eps: float, mass: float, max_iter: int = 100, thresh: float = 1e-3) -> Tensor:
    """Solve partial optimal transport problems with entropic regularization, by Sinkhorn's algorithm.

    There is one problem for each of A clients and each entry of the middle axes.  It transports from M rows, such as
    image tokens, to J columns, such as prompts.  Every column receives mass / J, and a row gives at most 1 / M.
    The plan is T = diag(u) exp(sim / eps) diag(v), up to a constant factor of v.
    Every problem stops by itself, so its plan does not depend on the others.  The last update is that of the columns,
    so their sums are exact.

    Args:
        sim: Similarities; the cost is 1 - sim.  # [A, J, ..., M]
        eps: Entropic regularization, > 0.
        mass: Transported mass, in (0, 1].
        max_iter: Maximum number of iterations.
        thresh: A problem stops when no log factor v of a column changes by this much in an iteration.  It is checked
            every CHECK iterations.

    Returns:
        Plans T, how much each row gives to each column.  # [A, J, ..., M]
    """
    x = sim.movedim(1, 0).flatten(1, -2) / eps  # [J, n, M]
    # n problems, of all clients; unsolved: the problems that x still has
    plans, unsolved = torch.empty_like(x), torch.arange(x.shape[1], device=x.device)
    a, b = 1 / x.shape[2], mass / x.shape[0]  # largest sum of a row of T, and sum of each column
    g = math.log(b) - x.logsumexp(-1, keepdim=True)  # [J, n, 1]
    for start in range(0, max_iter, CHECK):
        f = (math.log(a) - (x + g).logsumexp(0)).clamp_max(0)  # log u  [n, M]
        g = math.log(b) - (x + f).logsumexp(-1, keepdim=True)  # log v  [J, n, 1]
        T = b * (x + f).softmax(-1)  # exp(f + x + g)  [J, n, M]
        # CHECK - 1 = 9 further iterations, which multiply rows and columns of T; dv: the factors of columns together
        T, dv, last_factor = _scaled(T, a, b, min(CHECK, max_iter - start) - 1)
        settled = last_factor.log().abs() < thresh  # [J, n, 1]
        done = settled.all(0)[:, 0] | (start + CHECK >= max_iter)  # [n]
        plans[:, unsolved[done]] = T[:, done]
        if done.all():
            break
        # continue with the problems that have not converged
        x, g, unsolved = x[:, ~done], (g + dv.log())[:, ~done], unsolved[~done]
    return plans.view(sim.shape[1], sim.shape[0], *sim.shape[2:]).movedim(0, 1)


def _scaled(T: Tensor, a: float, b: float, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Continue Sinkhorn's iterations from plan T by updating factors du of its rows and dv of its columns.

    Each of n problems has M rows, whose sums are at most a, and J columns, whose sums are b.

    Args:
        T: Plan, which contains the current u and v.  # [J, n, M]
        a: Maximum row sum.
        b: Column sum.
        iterations: Number of iterations.

    Returns:
        The new plan [J, n, M], dv [J, n, 1], and the factor of the last update of dv [J, n, 1].
    """
    du, dv = 1.0, T.new_ones(*T.shape[:-1], 1)
    dv_before = dv
    for _ in range(iterations):
        # the bound u <= 1 becomes du <= 1: exact where u = 1 in T, and implied where u < 1, because u decreases
        du = (a / (T * dv).sum(0)).clamp_max(1)  # [n, M]
        dv_before, dv = dv, b / (T * du).sum(-1, keepdim=True)  # [J, n, 1]
    return T * du * dv, dv, dv / dv_before
