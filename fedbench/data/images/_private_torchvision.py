"""Private attributes of torchvision's data sets, the only ones that fedbench uses.

`tests/data/images/test_private_torchvision.py` looks for them in the installed version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# data set -> attribute with the paths of its pictures
PATHS = {
    "DTD": "_image_files",
    "Flowers102": "_image_files",
    "Food101": "_image_files",
    "OxfordIIITPet": "_images",
}
LABELS = "_labels"


def paths_and_labels(kind: str, dataset: Any) -> tuple[Sequence[Path], Sequence[int]]:
    """Return the paths of the pictures of a data set, and the label of each picture.

    Args:
        kind: The name of torchvision's class, a key of PATHS.
        dataset: The data set, an object of this class.
    """
    # the names of the private attributes that hold them
    return getattr(dataset, PATHS[kind]), getattr(dataset, LABELS)
