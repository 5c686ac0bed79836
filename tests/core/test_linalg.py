"""Products and distances of long rows keep their digits."""

import numpy as np
import pytest
import torch
from tiny import (
    close,
)

from fedbench.core.linalg import dot, products, squared_distances


def test_products_and_distances_of_long_rows() -> None:
    """Against float64 where cancellation leaves a float32 sum no digits; equal rows are at 0."""
    random = np.random.default_rng(0)
    a = torch.from_numpy(random.normal(size=(3, 200_003)).astype(np.float32)) + 30
    b = torch.cat([a[:1], a[1:2] + 1e-3])
    close(products(a, b), (a.double() @ b.double().T).float(), 1e-6)
    close(squared_distances(a, b), (a[:, None].double() - b.double()).square().sum(2).float(), 5e-5)
    assert float(squared_distances(a, b)[0, 0]) == 0


@pytest.mark.parametrize("size", [0, 7, 1 << 20, 12_000_003])
def test_dot_keeps_its_digits(size: int) -> None:
    """Against float64 where all products have one sign, so that a running float32 sum would lose them one by one."""
    random = np.random.default_rng(0)
    a = torch.from_numpy(random.uniform(size=(2, size)).astype(np.float32)) + 1
    close(dot(a, a[0]), (a.double() @ a[0].double()).float(), 5e-6)
    close(dot(a, a.flip(0)), (a.double() * a.flip(0).double()).sum(1).float(), 2e-6)
