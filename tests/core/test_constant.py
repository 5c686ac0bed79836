"""Constant columns are found as scikit-learn finds them, and nothing is divided by what rounding left of them."""

from __future__ import annotations

import numpy as np
from sklearn.preprocessing import StandardScaler

from fedbench.core.constant import deviation


def test_as_scikit_learn_finds_them() -> None:
    """Constant columns of any size; columns that differ little; one that differs in a single value."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 100, 499):
        level = rng.normal(100, 50, 40)  # [40]
        noise = np.where(np.arange(40) % 2, 10.0 ** -(np.arange(40) % 18), 0.0)
        columns = level + noise * rng.standard_normal((n, 40))
        columns[:, -1] = 80.1
        columns[-1, -1] = 80.2 if n > 1 else 80.1
        np.testing.assert_allclose(deviation(columns), StandardScaler().fit(columns).scale_, rtol=1e-3)


def test_float32_is_measured_in_float64() -> None:
    values = np.full((3, 1001), 0.1, np.float32)
    values[2] = np.linspace(0, 1, 1001)
    np.testing.assert_allclose(deviation(values, 1), [1, 1, values[2].std(dtype=np.float64)])
