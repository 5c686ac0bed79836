"""Detection of constant columns, independent of rounding errors in their variance.

The variance of a constant column is seldom exactly 0 in floating point, and dividing by it would magnify rounding
errors.  The rule is that of scikit-learn's StandardScaler.

References: Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983.
"""

from __future__ import annotations

import numpy as np

EPS = float(np.finfo(np.float64).eps)


def is_constant(mean: np.ndarray, variance: np.ndarray, n: int) -> np.ndarray:
    """Return whether n values of this mean and variance differ by rounding alone.

    Args:
        mean: In float64.
        variance: Of the population (ddof 0), of the same shape.
        n: The number of values behind each mean.

    Returns:
        A boolean of the same shape.
    """
    return variance <= n * EPS * variance + (n * mean * EPS) ** 2


def deviation(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return standard deviations (ddof 0) along an axis, with 1 for constant values, as safe divisors."""
    mean, variance = values.mean(axis, dtype=np.float64), values.var(axis, dtype=np.float64)
    return np.where(is_constant(mean, variance, values.shape[axis]), 1.0, np.sqrt(variance))
