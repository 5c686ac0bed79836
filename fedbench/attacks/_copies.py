"""Changed copies of samples, for attacks on data.

Copies are appended to the data set, and only the attackers' lists of training samples name them.  So neither other
clients nor the validation and test samples change, even if they have the same samples.

Letters: n samples of the data set, k copies.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedbench.core.inputs import unwrap_inputs
from fedbench.core.options import require
from fedbench.core.split import Ragged
from fedbench.data.base import Arrays


def require_classes(arrays: Arrays, attack: str) -> None:
    """Raise ConfigError unless the targets of the data set are one class per sample.

    Args:
        arrays: The data set.
        attack: Name of the attack for the message, such as "label_flip".
    """
    require(
        arrays.task == "classification",
        f"attack={attack} changes classes, but the targets of this data set are of the kind {arrays.task}: use a data "
        "set of classification, or an attack on uploads such as attack=sign_flip",
    )


def append_copies(arrays: Arrays, samples: np.ndarray, targets: np.ndarray, images: np.ndarray | None = None) -> Arrays:
    """Return the data set with copies of samples at its end.

    Args:
        arrays: The data set.
        samples: Indices of the samples to copy.  # [k]
        targets: Targets of the copies.  # [k]
        images: Images of the copies, for a data set of images.  None: copies share the stored inputs of their samples.
            # [k, channels, height, width]

    Returns:
        The data set of n + k samples.
    """
    # from the name of an input to the stored entry of it that each sample reads; samples may share entries
    shared = {}
    inputs = arrays.parts()  # stored entries of each input, by name
    for name, values in inputs.items():
        entries = (arrays.shared or {}).get(name, np.arange(len(arrays)))  # [n]
        copies = entries[samples] if images is None else len(values) + np.arange(len(samples))  # [k]
        shared[name] = np.concatenate([entries, copies])
        inputs[name] = values if images is None else np.concatenate([values, images])
    per_sample = {name: getattr(arrays, name) for name in ("split", "domain", "subject")}  # [n] each, or None
    return replace(
        arrays,
        inputs=unwrap_inputs(inputs, arrays.inputs),
        shared=shared,
        targets=np.concatenate([arrays.targets, targets.astype(arrays.targets.dtype)]),
        **{name: np.concatenate([v, v[samples]]) for name, v in per_sample.items() if v is not None},
    )


def entries_of(lists: Ragged, clients: np.ndarray) -> np.ndarray:
    """Return the positions in `lists.indices`, the concatenated samples of all clients, that belong to some clients.

    Args:
        lists: The samples of each client.
        clients: Ids of the clients.

    Returns:
        Positions, ascending.  # [k] int64
    """
    return np.flatnonzero(np.isin(lists.owners(), clients))


def with_entries(lists: Ragged, positions: np.ndarray, samples: np.ndarray) -> Ragged:
    """Return lists of samples in which some entries are replaced.

    Args:
        lists: The samples of each client.
        positions: Positions in `lists.indices`, which has the samples of client 0, then 1, and so on.  # [k]
        samples: The new samples.  # [k]

    Returns:
        The lists; those that were given do not change.
    """
    indices = lists.indices.copy()
    indices[positions] = samples
    return Ragged(indices, lists.offsets)  # offsets: where the samples of each client begin
