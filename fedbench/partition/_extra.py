"""Extra samples of a data set, for example synthesized images, which are used for training only.

They are assigned last, so that validation and test samples do not depend on them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.options import ConfigError
from fedbench.data.base import EXTRA, Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split


def add_extra(
    train: Sequence[np.ndarray], extra: np.ndarray, domain: np.ndarray | None, rng: np.random.RandomState
) -> list[np.ndarray]:
    """Append extra samples to the training samples of the clients of the same client site.

    The extra samples of a site are divided evenly among its clients: their numbers differ by at most one.

    Args:
        train: Indices of the training samples of each client.
        extra: Indices of the extra samples, which no client has yet.
        domain: The client site (hospital, user) of each sample of the data set, [n].  None: it has no client sites.
        rng: The generator that shuffles the extra samples of each site.

    Returns:
        Training samples of each client, the extra ones last.

    Raises:
        ConfigError: The data set has no client sites, or no client trains on a site that has extra samples.
    """
    if domain is None:
        raise ConfigError(
            "the data set has extra (synthesized) samples but no client sites (domain), which determine their clients: "
            "use data with client sites, or leave the extra samples out (dataset.extra=null)"
        )
    sites = [set(np.unique(domain[samples]).tolist()) for samples in train]
    parts = [[samples] for samples in train]
    for site in np.unique(domain[extra]).tolist():
        clients = [i for i, client_sites in enumerate(sites) if site in client_sites]
        if not clients:
            raise ConfigError(f"no client trains on client site {site}, which has extra samples: use partition=domain")
        shuffled = rng.permutation(extra[domain[extra] == site])
        for j, i in enumerate(clients):
            parts[i].append(shuffled[j :: len(clients)])  # deal them out in turn
    return [np.concatenate(client_parts) for client_parts in parts]


def count_extra(split: "Split", arrays: Arrays) -> np.ndarray:
    """Return the number of extra samples in the training part of each client.  # [N]

    Extra samples, such as synthesized images, are those with the code EXTRA in ``arrays.split``.
    """
    client_of_sample = split.train.owners()  # of each of split.train.indices, which joins all training parts
    clients = client_of_sample[arrays.split[split.train.indices] == EXTRA]
    return np.bincount(clients, minlength=split.num_clients)
