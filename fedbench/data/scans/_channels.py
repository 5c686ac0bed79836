"""Channels that some clients lack: pFedNet's "lacking channel" federations, for scans of several modalities.

Source: pFedNet, section on BraTS17, which names the missing channel but not the clients; here the first `clients`
clients lack it.  The channel becomes 0, the mean of a standardized scan.
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
class MissingChannel:
    """Set a channel to 0 in all samples of the first clients; the `fit` of Arrays (`data/base.py`).

    Args:
        channel: The index of the channel.
        clients: The number of clients that lack it, 0 to clients - 1.  None: all.
    """

    channel: int
    clients: int | None = 2

    def __call__(self, arrays: Arrays, split: Split, normalize: bool) -> Arrays:
        """Return the arrays with a changed copy of the inputs.

        Args:
            arrays: The arrays, whose inputs are [n, channels, ...].
            split: The samples of each client.
            normalize: Not used.

        Raises:
            ConfigError: More clients are to lack the channel than there are.
        """
        count = split.num_clients if self.clients is None else self.clients
        require(
            count <= split.num_clients,
            f"dataset.lack_clients={count} must be at most the number of clients, {split.num_clients}: lower it, or "
            "set it to null for all clients",
        )
        inputs = np.array(arrays.inputs)
        for part in (split.train, split.val, split.test):
            first_samples = part.indices[: part.offsets[count]]  # those of the first `count` clients
            inputs[first_samples, self.channel] = 0
        return replace(arrays, inputs=inputs)


def missing_channel(lack: str | None, channels: Sequence[str], clients: int | None) -> MissingChannel | None:
    """Return the function for `Arrays.fit` that sets a channel to 0 for some clients; None if none is missing.

    Each channel of the images is one modality of a scan, such as FLAIR.

    Args:
        lack: The modality whose channel is missing, the option dataset.lack.  None: no channel is missing.
        channels: The modalities of all channels, in their order.
        clients: The option dataset.lack_clients: clients 0 to clients - 1 lack the channel.  None: all clients.
    """
    if lack is None:
        return None
    require(lack in channels, f"dataset.lack={lack!r} is no modality: set it to {', '.join(channels)}, or null")
    return MissingChannel(list(channels).index(lack), clients)
