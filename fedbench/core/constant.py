"""Detect constant columns despite rounding errors, as scikit-learn's StandardScaler does.

The computed variance of a constant column is often not exactly 0.  Dividing by it would magnify rounding errors.

References:
    Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983.
"""

from __future__ import annotations

import numpy as np

EPS = float(np.finfo(np.float64).eps)  # the distance from 1 to the next larger float64


def is_constant(mean: np.ndarray, variance: np.ndarray, n: int) -> np.ndarray:
    """Return whether values differ only by rounding errors, given their mean and variance.

    Args:
        mean: Means in float64.  # [...]
        variance: Population variances (ddof 0).  # [...]
        n: The number of values of each mean.

    Returns:
        Booleans [...].
    """
    return variance <= n * EPS * variance + (n * mean * EPS) ** 2  # the bound of the rounding error in the reference


def deviation(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return standard deviations (ddof 0) along an axis, with 1 for constant values, for use as divisors."""
    mean, variance = values.mean(axis, dtype=np.float64), values.var(axis, dtype=np.float64)
    return np.where(is_constant(mean, variance, values.shape[axis]), 1.0, np.sqrt(variance))
