"""Detect constant columns despite rounding errors, as scikit-learn's StandardScaler does.

The computed variance of a constant column is often not exactly 0.  Dividing by it would magnify rounding errors.

References:
    Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983.
"""

from __future__ import annotations

import numpy as np

EPS = float(np.finfo(np.float64).eps)  # the distance from 1 to the next larger float64


def is_constant(mean: np.ndarray, variance: np.ndarray, n: int) -> np.ndarray:
    """Return whether columns are constant up to rounding errors, given their means and variances.

    Args:
        mean: The mean of each column, in float64.  # [...]
        variance: The population variance (ddof 0) of each column.  # [...]
        n: The number of values in a column.

    Returns:
        True for each constant column.  # [...] bool
    """
    largest_rounding_error = n * EPS * variance + (n * mean * EPS) ** 2  # by Chan, Golub and LeVeque
    return variance <= largest_rounding_error


def deviation(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return standard deviations by which values can be divided: 1 in place of 0.

    Args:
        values: An array.
        axis: The axis over which deviations are computed.

    Returns:
        float64 deviations (ddof 0), of the shape of values without the axis.  A constant column has 1.
    """
    mean, variance = values.mean(axis, dtype=np.float64), values.var(axis, dtype=np.float64)
    return np.where(is_constant(mean, variance, values.shape[axis]), 1.0, np.sqrt(variance))
