"""Extra samples (synthesized images, say) that a data set brings along for training only.

They are dealt after everything else is drawn: who is validated and tested on what does not depend on them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.options import ConfigError
from fedbench.data.base import EXTRA, Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split


def deal_extra(
    train: Sequence[np.ndarray], extra: np.ndarray, domain: np.ndarray | None, rng: np.random.RandomState
) -> list[np.ndarray]:
    """Each client's training samples, and behind them its share of the extra ones.

    An extra sample goes to the client that trains on its natural silo's own; several such clients share evenly.
    """
    if domain is None:
        raise ConfigError("extra samples belong to natural silos, but this data set has none")
    silos = [set(np.unique(domain[samples]).tolist()) for samples in train]
    dealt = [[samples] for samples in train]
    for silo in np.unique(domain[extra]).tolist():
        clients = [i for i, held in enumerate(silos) if silo in held]
        if not clients:
            raise ConfigError(f"no client trains on natural silo {silo}, to which extra samples belong")
        of_silo = rng.permutation(extra[domain[extra] == silo])
        for j, i in enumerate(clients):
            dealt[i].append(of_silo[j :: len(clients)])
    return [np.concatenate(parts) for parts in dealt]


def count_extra(split: "Split", arrays: Arrays) -> np.ndarray:
    """How many of each client's training samples are extra ones, [N]."""
    owners = split.train.owners()[arrays.split[split.train.indices] == EXTRA]
    return np.bincount(owners, minlength=split.num_clients)
