"""Hyperparameters that differ by client: a list of N numbers where a method's option may be one number.

    class FedProx(FedAvg):
        def __init__(self, mu: NonNegative | list[NonNegative] = 0.01):
            self.mu = per_client(mu)
        ...  lambda s: s.value(self.mu) * (s.theta - w)      in a step: the number, or each active client's  # [k, 1]
        ...  cohort.value(self.mu) * alpha @ G               outside: the number, or each client's  # [K, 1]

A list of equal numbers gives the bits of the one number: both are rounded to float32 last, and are factors, never the
alpha= of an add_, which rounds once where a product and a sum round twice.  (A rate of `descend` is such an alpha while
it is one number.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.round_context import RoundContext


class PerClient:
    """One number for each of the N clients, in float64 as Python's numbers; false where all are 0, as the number 0 is.

    Products, quotients and differences with numbers and with others of its kind are taken client by client, in
    float64.  Methods compute them outside of a step: `s.value` knows a hyperparameter by its identity.
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

    def __truediv__(self, number: float) -> PerClient:
        return PerClient(self.values / number)

    def __rsub__(self, number: float) -> PerClient:
        return PerClient(number - self.values)

    def of(self, ids: np.ndarray, device: torch.device) -> Tensor:
        """The values of clients ids [k].  # [k, 1] float32"""
        return torch.from_numpy(self.values[ids].astype(np.float32))[:, None].to(device)


def per_client(value: float | Sequence[float] | None) -> Any:
    """A number (or None) as it is, a list as PerClient."""
    return PerClient(value) if isinstance(value, Sequence) else value


def fractions(value: float | PerClient, context: RoundContext) -> Tensor:
    """value_i / sum over these clients: 1 / K where all have one number.  # [K]"""
    each = value.values[context.ids] if isinstance(value, PerClient) else np.ones(len(context))
    return torch.from_numpy(each / each.sum()).float().to(context.device)


def mean(value: float | PerClient) -> float:
    """The mean over all N clients."""
    return float(value.values.mean()) if isinstance(value, PerClient) else value
