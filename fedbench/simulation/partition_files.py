"""Write the partition of a run: the samples of each client in partition.npz, hash and sizes in partition.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.files import replace_text
from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data.base import EXTRA, Arrays
from fedbench.partition._extra import count_extra

log = logging.getLogger(__name__)
MOST_COUNTS = 200_000  # largest number of clients x classes for which partition.json has label counts


def save_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """Write partition.npz and partition.json.

    Args:
        split: The partition.
        arrays: The data set.
        run_dir: The run folder.
    """
    split.save(run_dir / "partition.npz")
    replace_text(run_dir / "partition.json", [json.dumps(partition_facts(split, arrays)) + "\n"])


def rewrite_damaged_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """Write partition.npz and partition.json of a resumed run again, after a warning, if they were changed or damaged.

    Args:
        split: The partition.
        arrays: The data set.
        run_dir: The run folder.
    """
    try:
        now, stored = partition_facts(split, arrays), json.loads((run_dir / "partition.json").read_text())
        fits = (
            Split.load(run_dir / "partition.npz").hash == split.hash
            and stored["hash"] == split.hash
            and all(now.get(name) == value for name, value in stored.items())  # older versions wrote fewer entries
        )
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        log.warning("%s: partition.npz or partition.json was changed or damaged; both are written again", run_dir)
        save_partition(split, arrays, run_dir)


def partition_facts(split: Split, arrays: Arrays) -> dict[str, Any]:
    """Return the content of partition.json.

    Args:
        split: The partition.
        arrays: The data set.
    """
    return {
        "hash": split.hash,
        "num_clients": split.num_clients,
        "num_classes": arrays.num_classes,
        **({} if split.names is None else {"names": list(split.names)}),
        "train": split.train.sizes.tolist(),
        "val": split.val.sizes.tolist(),
        "test": split.test.sizes.tolist(),
        **_described(split, arrays),  # class counts and names of domains, for figures and reports
    }


def _described(split: Split, arrays: Arrays) -> dict[str, Any]:
    """Return the entries of partition.json that only figures and reports read.

    Returns:
        "extra": the number of extra samples of each client [N], if the data set has any; "domains": the name of each
        client's domain [N], if samples have domains; "label_counts": training samples by client and class [N, C], and
        "class_names", unless N x C exceeds MOST_COUNTS.
    """
    train = split.train
    facts: dict[str, Any] = {}
    if (arrays.split == EXTRA).any():  # samples for training only, besides the original ones
        facts["extra"] = count_extra(split, arrays).tolist()
    if arrays.domain is not None and arrays.domain_names is not None:
        # the domain of each client's first training sample
        facts["domains"] = [arrays.domain_names[d] for d in arrays.domain[train.indices[train.offsets[:-1]]]]
    if split.num_clients * arrays.num_classes <= MOST_COUNTS:
        labels = arrays.labels()[train.indices]
        width = max(arrays.num_classes, int(labels.max())) + 1  # multi-label: C means no label
        table = np.bincount(train.owners() * width + labels, minlength=split.num_clients * width)
        are_classes = width == arrays.num_classes + 1  # else they are bins of a regression's targets
        label_counts = table.reshape(split.num_clients, -1)[:, : arrays.num_classes if are_classes else width]
        facts["label_counts"] = label_counts.tolist()
        facts["class_names"] = arrays.class_names
    return facts
