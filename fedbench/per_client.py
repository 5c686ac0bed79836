"""Hyperparameters that differ by client: a list of N numbers where a method's option may be one number.

    class FedProx(FedAvg):
        def __init__(self, mu: NonNegative | list[NonNegative] = 0.01):
            self.mu = per_client(mu)
        ...  lambda s: s.own(self.mu) * (s.theta - w)          in a step: the number, or each active client's  # [k, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class PerClient:
    """values [N]; false where all are 0, as the number 0 is."""

    def __init__(self, values: Sequence[float]):
        self.values = np.asarray(values, np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        return bool(self.values.any())

    def of(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """The values of clients ids [k].  # [k, 1]"""
        return torch.from_numpy(self.values[ids])[:, None].to(device)


def per_client(value: float | Sequence[float]) -> float | PerClient:
    """A number as it is, a list as PerClient."""
    return value if isinstance(value, int | float) else PerClient(value)
