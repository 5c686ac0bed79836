"""Quadratic programs over the probability simplex."""

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

RIDGE = 1e-12  # added to the diagonal, relative to its mean, so that a singular Q has one minimizer


def minimize_on_simplex(Q: np.ndarray) -> np.ndarray:
    """Return the weights a >= 0 of sum 1 that minimize a^T Q a.

    With x = a / (a^T Q a) the conditions of optimality are x >= 0, Q x >= 1 and x^T (Q x - 1) = 0.  These are those of
    min x^T Q x / 2 - sum x over x >= 0, which is a nonnegative least-squares problem in a Cholesky factor of Q.

    Args:
        Q: Symmetric positive semidefinite matrix.  # [K, K] float64

    Returns:
        The weights.  # [K] float64
    """
    scale = np.trace(Q) / len(Q)
    if scale <= 0:  # Q is 0, and all weights are equally good
        return np.full(len(Q), 1 / len(Q))
    # lower factor [K, K]; the ridge of 1e-12 makes it exist for a singular Q
    factor = np.linalg.cholesky(Q / scale + RIDGE * np.eye(len(Q)))
    # minimizes |factor' x - factor^-1 1|^2 over x >= 0; the default of 3 K iterations may be too few
    x, _ = nnls(factor.T, solve_triangular(factor, np.ones(len(Q)), lower=True), maxiter=100 * len(Q))
    return x / x.sum()
