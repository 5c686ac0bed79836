"""Products of low rank (LoRA) whose rank differs between clients, in rows of one length.

All rows have the columns of the largest rank R.  Client i has rank r_i: the first r_i rows of each factor A and the
first r_i columns of each factor B.  The other columns of its row are 0, so that its row has a product of rank r_i.

Letters: N clients, k some of them, P length of a row, n length of a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import RunError
from fedbench.nn.flat import FlatModel


class ClientRanks:
    """The ranks of the clients, and which columns of a row each client has.

    Args:
        ranks: The rank of each training client, r_i.  Clients with a higher index are new, and have rank R.  # [N]
        model: The model, whose factors are named lora_A and lora_B.
    """

    def __init__(self, ranks: Sequence[int], model: FlatModel):
        self.ranks, self.model = np.asarray(ranks, np.int64), model
        # The least rank with which a client has each column; 0 for columns of all clients.  # [P]
        self.needed = torch.zeros(model.size, dtype=torch.int64, device=model.device)
        for (start, stop), index in zip(model.spans.values(), rank_indices(model)):
            if index is not None:
                self.needed[start:stop] = index.to(model.device) + 1
        self._needed_by_length: dict[int, Tensor | None] = {}  # `needed` of each number of a message of this length

    def of(self, ids: np.ndarray) -> Tensor:
        """Return the ranks of some clients.

        Args:
            ids: The clients.  # [k]

        Returns:
            The ranks, on the device.  # [k, 1] int64
        """
        is_new = ids >= len(self.ranks)  # clients that took no part in training have the largest rank
        ranks = np.where(is_new, self.ranks.max(), self.ranks[np.where(is_new, 0, ids)])
        return torch.from_numpy(ranks)[:, None].to(self.model.device)

    def has(self, ids: np.ndarray, length: int) -> Tensor | None:
        """Return which numbers of a message or row each client has.

        Args:
            ids: The clients.  # [k]
            length: Number of numbers, n: a row, a column group, or all columns that are not in a group.

        Returns:
            Whether the client has each number.  None: the message is not a part of a row, such as a list of losses.
                # [k, n] bool

        Raises:
            RunError: Different column groups have this length.
        """
        if length not in self._needed_by_length:
            candidates = self.model.columns_of(length)  # the sets of columns of which it may consist
            if len(candidates) > 1:
                raise RunError(
                    f"adapter.rank lists different ranks, but a message of {length:,} numbers fits {len(candidates)} "
                    "groups of model.columns, so that the clients' parts of it are unknown: merge these groups, or use "
                    "one rank"
                )
            # needed: the smallest rank of a client that has a number
            self._needed_by_length[length] = candidates[0].take(self.needed) if candidates else None
        needed = self._needed_by_length[length]
        return None if needed is None else needed <= self.of(ids)

    def truncated(self, ids: np.ndarray, rows: Tensor) -> Tensor:
        """Return a copy of rows or messages in which the numbers above each client's rank are 0.

        Args:
            ids: The clients.  # [k]
            rows: One for all clients [n], or one for each [k, n].

        Returns:
            The truncated copies [k, n]; the tensor itself if it is not a part of a row.
        """
        has = self.has(ids, rows.shape[-1])
        return rows if has is None else torch.where(has, rows, 0)

    def num_values(self, ids: np.ndarray, length: int) -> Tensor | None:
        """Return how many numbers of a message each client has [k]; None if the message is not a part of a row.

        Parts of rows (whole rows, column groups) are recognized by their length: see `has`.

        Args:
            ids: The clients.  # [k]
            length: Number of numbers of the message of a client with the largest rank.
        """
        has = self.has(ids, length)
        return None if has is None else has.sum(1)


def rank_indices(model: FlatModel) -> list[Tensor | None]:
    """Return, for each tensor of a row, the position along the rank of each of its entries, from 0.

    Args:
        model: The model.  A factor A [r, ...] has its rank in the first dimension, B [out, r, ...] in the second.

    Returns:
        The positions [size] of the entries of each tensor; None for a tensor that is no factor.
    """
    indices: list[Tensor | None] = []
    for name, shape in model.shapes.items():
        # names end in ".lora_A.weight" or ".lora_B.weight"
        dim = {"lora_A": 0, "lora_B": 1}.get(name.split(".")[-2] if "." in name else "")
        if dim is None:
            indices.append(None)
        else:
            positions = torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - dim - 1))
            indices.append(positions.expand(shape).reshape(-1))
    return indices
