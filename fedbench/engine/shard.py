"""The samples that one process of a run stores, if processes divide them (hardware.samples=sharded).

Every process draws the same partition, and knows the sizes and the samples' numbers of all clients.  It stores the
inputs of its own clients' samples.  Labels, one number for each sample, are stored by all processes.

Letters: N clients, n samples of the data set, m stored samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedbench.core.split import Ragged

EXAMPLES = 6  # training samples that all processes store besides sample 0, to find out shapes and to try the model


@dataclass(frozen=True)
class Shard:
    """The clients (`owned`) and the `samples` that one process stores.

    Attributes:
        owned: Whether this process owns each client, new clients included.  # [N] bool
        samples: The stored samples, ascending: those of these clients, and a few examples.  # [m] int64
    """

    owned: np.ndarray
    samples: np.ndarray

    @classmethod
    def of(cls, owned: np.ndarray, parts: Iterable[Ragged]) -> Shard:
        """Return the shard of a process.

        Args:
            owned: Whether this process owns each client.  # [N] bool
            parts: All samples of the clients: those for training first, and those for validation, test, and so on.
        """
        # besides its clients' samples, every process stores sample 0 and the first EXAMPLES of the training samples,
        # to find out shapes and to try the model
        parts = list(parts)
        # a part without new clients has fewer clients than `owned`
        samples = [part.indices[np.repeat(owned[: len(part)], part.sizes)] for part in parts]
        return cls(owned, np.unique(np.concatenate([np.zeros(1, np.int64), parts[0].indices[:EXAMPLES], *samples])))

    def entries(self, shared: np.ndarray | None) -> np.ndarray:
        """Return which entries of an input, such as images or texts, this process stores, ascending.  # [m] int64

        Args:
            shared: The index of each sample's entry [n], if several samples share one.  None: sample i has entry i.
        """
        return self.samples if shared is None else np.unique(shared[self.samples])

    def select_clients(self, ids: np.ndarray) -> Shard:
        """Return a shard whose clients 0 to k - 1 are the clients ids [k] of this one, with the same stored samples."""
        return replace(self, owned=self.owned[ids])

    def require_owned(self, ids: np.ndarray) -> None:
        """Check that this process stores the samples of clients.

        Args:
            ids: The clients.  # [k]

        Raises:
            RuntimeError: It does not.
        """
        others = ids[~self.owned[ids]]
        if len(others):
            raise RuntimeError(
                f"this process has no samples of client {others[0]}, because hardware.samples=sharded: set "
                "hardware.samples=replicated, or compute the client in the process that has its samples"
            )


def positions_in(stored: Tensor, index: Tensor) -> Tensor:
    """Return where entries are stored.

    Args:
        stored: The stored entries, ascending.  # [m] int64
        index: Entries of the data set.  # [b] int64

    Returns:
        Positions in `stored`.  # [b] int64

    Raises:
        RuntimeError: An entry is not stored.  Only a CPU checks this, because a GPU would have to wait.
    """
    positions = torch.searchsorted(stored, index)
    if index.device.type == "cpu":  # an index above all stored ones has position m, which is none
        positions.clamp_(max=max(len(stored) - 1, 0))
        if not torch.equal(stored[positions], index):
            raise RuntimeError(
                "this process does not store a sample that it was asked for, because hardware.samples=sharded: set "
                "hardware.samples=replicated, or compute the client in the process that has its samples"
            )
    return positions
