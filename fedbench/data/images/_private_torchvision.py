"""Names of torchvision that it keeps private: all that fedbench uses stand here, and nowhere else.

They are attributes that its data sets get when they are made; tests/data/test_private_torchvision.py looks for them in
the version that is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# data set -> where it has the paths of its pictures
PATHS = {
    "DTD": "_image_files",
    "Flowers102": "_image_files",
    "Food101": "_image_files",
    "OxfordIIITPet": "_images",
}
LABELS = "_labels"


def paths_and_labels(kind: str, dataset: Any) -> tuple[Sequence[Path], Sequence[int]]:
    """Paths and labels of the pictures of a data set.  kind: its name in PATHS."""
    return getattr(dataset, PATHS[kind]), getattr(dataset, LABELS)
