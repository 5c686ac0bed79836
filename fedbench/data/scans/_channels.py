"""Channels that some clients lack: pFedNet's "lacking channel" federations, for scans of several modalities.

Source: pFedNet, section on BraTS17, which names the missing channel and not the clients; here the first `clients`
clients lack it.  It is filled with 0, the mean of a scan that is standardized.  Who has which sample is known once the
samples are divided, so that this is a `fit` of Arrays (data/base.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.options import require
from fedbench.data.base import Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split


@dataclass(frozen=True)
class Lacking:
    """channel: the number of the channel that is 0 in all samples (also for validation and test) of the first
    `clients` clients; None: of all."""

    channel: int
    clients: int | None = 2

    def __call__(self, arrays: Arrays, split: Split, normalize: bool) -> Arrays:
        """The arrays, inputs [n, channels, ...] copied; ConfigError where there are fewer clients."""
        count = split.num_clients if self.clients is None else self.clients
        require(
            count <= split.num_clients,
            f"dataset.lack_clients={count} is more than the {split.num_clients} clients there are",
        )
        inputs = np.array(arrays.inputs)
        for part in (split.train, split.val, split.test):
            inputs[part.indices[: part.offsets[count]], self.channel] = 0
        return replace(arrays, inputs=inputs)


def lacking(lack: str | None, channels: Sequence[str], clients: int | None) -> Lacking | None:
    """The `fit` for the option `lack`, one of the channels' names; None where nothing is lacking."""
    if lack is None:
        return None
    require(lack in channels, f"dataset.lack={lack!r} is none of the modalities {', '.join(channels)}")
    return Lacking(list(channels).index(lack), clients)
