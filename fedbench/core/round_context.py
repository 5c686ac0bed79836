"""The clients that are processed together, and their round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Mode = Literal["round", "evaluation", "trial", "new clients"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundContext:
    """Some clients in one round.

    Attributes:
        ids: The clients, ascending.  # [K] int64
        num_samples: Their numbers of training samples.  # [K] int64
        client_weights: Their weights in a mean, not normalized: n_i, or 1 with client_weights=uniform.  # [K] float64
        num_clients: The number of clients of the federation.
        round: The round, from 0.
        mode: "round", "evaluation", "trial" or "new clients".  Only "round" may change the state of clients.
        seed: The run's seed.
        device: The compute device.
    """

    ids: np.ndarray
    num_samples: np.ndarray
    client_weights: np.ndarray
    num_clients: int
    round: int
    mode: Mode
    seed: int
    device: torch.device

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def changes_state(self) -> bool:
        """Whether client states may change: only in mode "round"."""
        return self.mode == "round"

    @property
    def mean_weights(self) -> Tensor:
        """`client_weights` divided by their sum: the weights n_i / sum n, or 1 / K.  On the device.  # [K] float32"""
        return torch.from_numpy(self.client_weights / self.client_weights.sum()).float().to(self.device)
