"""The partition as files of the run: the samples of each client in partition.npz, hash and sizes in partition.json."""

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
MOST_CELLS = 200_000  # of clients x classes in partition.json


def save_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """The partition as an artifact: partition.npz, and partition.json with its hash and sizes."""
    split.save(run_dir / "partition.npz")
    replace_text(run_dir / "partition.json", [json.dumps(partition_facts(split, arrays)) + "\n"])


def rewrite_damaged_partition(split: Split, arrays: Arrays, run_dir: Path) -> None:
    """Write the partition's files again where they are no longer what they were."""
    try:
        now, stored = partition_facts(split, arrays), json.loads((run_dir / "partition.json").read_text())
        fits = (
            Split.load(run_dir / "partition.npz").hash == split.hash
            and stored["hash"] == split.hash
            and all(now.get(name) == value for name, value in stored.items())
        )  # of an older version: some are missing
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        log.warning("%s: partition.npz or partition.json was not that of the run; both are written again", run_dir)
        save_partition(split, arrays, run_dir)


def partition_facts(split: Split, arrays: Arrays) -> dict[str, Any]:
    """What partition.json says."""
    return {
        "hash": split.hash,
        "num_clients": split.num_clients,
        "num_classes": arrays.num_classes,
        **({} if split.names is None else {"names": list(split.names)}),
        "train": split.train.sizes.tolist(),
        "val": split.val.sizes.tolist(),
        "test": split.test.sizes.tolist(),
        **_described(split, arrays),
    }


def _described(split: Split, arrays: Arrays) -> dict[str, Any]:
    """What figures and reports ask of a partition: extra samples among the training ones [N], each client's natural
    silo [N], classes, and training samples by client and class [N, C] unless they are very many."""
    train = split.train
    facts: dict[str, Any] = {}
    if (arrays.split == EXTRA).any():
        facts["extra"] = count_extra(split, arrays).tolist()
    if arrays.domain is not None and arrays.domain_names is not None:
        facts["domains"] = [arrays.domain_names[d] for d in arrays.domain[train.indices[train.offsets[:-1]]]]
    if split.num_clients * arrays.num_classes <= MOST_CELLS:
        labels = arrays.labels()[train.indices]
        width = max(arrays.num_classes, int(labels.max())) + 1  # multi-label: C is none
        table = np.bincount(train.owners() * width + labels, minlength=split.num_clients * width)
        are_classes = width == arrays.num_classes + 1  # else they are parts of the range of a regression's targets
        counted = table.reshape(split.num_clients, -1)[:, : arrays.num_classes if are_classes else width]
        facts["label_counts"] = counted.tolist()
        facts["class_names"] = arrays.class_names
    return facts
