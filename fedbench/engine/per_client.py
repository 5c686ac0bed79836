"""Hyperparameters with one value for each client.  An option accepts one value or a list of N values.

    class FedProx(FedAvg):
        def __init__(self, mu: NonNegative | list[NonNegative] = 0.01):
            self.mu = per_client(mu)
        ...  lambda s: s.value(self.mu) * (s.theta - w)      in a step: one value, or one for each client  # [k, 1]
        ...  cohort.value(self.mu) * alpha @ G               outside: one value, or one for each client  # [K, 1]

A list of equal values gives the same results, bit for bit, as one value.  Use values as factors, never as alpha= of
torch.add, which rounds once, while a product and a sum round twice.

Letters: N clients of the federation, K clients of the cohort, k clients of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.round_context import RoundContext


class PerClient:
    """One value for each of the N clients.  As the number 0, it is false in a condition if all values are 0.

    Arithmetic is elementwise, in float64 as that of Python numbers.  Use it outside of steps, because `s.value` caches
    values by the identity of the object.

    Args:
        values: The values.  # [N]
    """

    def __init__(self, values: Sequence[float] | np.ndarray):
        self.values = np.asarray(values, np.float64)

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        return bool(self.values.any())

    def __mul__(self, other: float | PerClient) -> PerClient:
        return PerClient(self.values * (other.values if isinstance(other, PerClient) else other))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> PerClient:
        return PerClient(self.values / divisor)

    def __rsub__(self, minuend: float) -> PerClient:
        return PerClient(minuend - self.values)

    def of(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """Return the values of some clients.

        Args:
            ids: The clients.  # [k]
            device: The compute device.

        Returns:
            The values.  # [k, 1] float32
        """
        return torch.from_numpy(self.values[ids].astype(np.float32))[:, None].to(device)


def per_client(value: float | Sequence[float] | None) -> Any:
    """Return the value of an option in the form that `s.value` and `cohort.value` accept.

    Args:
        value: A list with one value for each of the N clients, one number for all, or None.

    Returns:
        PerClient for a list; a number or None is returned unchanged.
    """
    return PerClient(value) if isinstance(value, Sequence) else value


def fractions(value: float | PerClient, context: RoundContext) -> Tensor:
    """Return value_i / sum_j value_j over the clients of a cohort, which is 1 / K for one value.

    Args:
        value: One value, or one for each client.
        context: The clients.

    Returns:
        The fractions.  # [K] float32
    """
    values = value.values[context.ids] if isinstance(value, PerClient) else np.ones(len(context))
    return torch.from_numpy(values / values.sum()).float().to(context.device)


def mean(value: float | PerClient) -> float:
    """Return the unweighted mean of a hyperparameter over all N clients; one number for all is returned unchanged."""
    return float(value.values.mean()) if isinstance(value, PerClient) else value
