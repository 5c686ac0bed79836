"""Divide an image data set into two npz files with different classes, to pretrain on one and adapt to the other.

    uv run python scripts/split_classes.py first.npz second.npz dataset=cifar10
    uv run python -m fedbench dataset=npz dataset.path=first.npz dataset.split=published ...

The first file has the first half of the classes, or the number that --classes gives, and the second file the others.
Each keeps the published training and test samples of its classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedbench.app.compose import compose
from fedbench.core.options import require
from fedbench.data.base import TEST, Arrays
from fedbench.simulation import build


def write_classes(path: Path, arrays: Arrays, classes: range) -> None:
    """Write the samples of some classes in the flat layout of dataset=npz.

    Args:
        path: The file.
        arrays: Images [n, channels, H, W] with one label each.
        classes: Labels of consecutive classes, which become 0, 1, ... in the file.
    """
    selected = np.flatnonzero(np.isin(arrays.targets, list(classes)))
    split = np.where(arrays.split[selected] == TEST, "test", "train")
    names = np.array([str(c) for c in arrays.class_names or range(arrays.num_classes)])[classes.start : classes.stop]
    images = np.asarray(arrays.inputs)[selected]
    np.savez(path, X=images, y=arrays.targets[selected] - classes.start, split=split, classes=names)
    print(f"{path}: {len(selected):,} images of {', '.join(names)}")


def main() -> None:
    """Read the data set and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="the .npz file of the first classes")
    parser.add_argument("second", type=Path, help="the .npz file of the others")
    parser.add_argument("overrides", nargs="+", help="dataset=cifar10 and its options")
    parser.add_argument("--classes", type=int, help="number of classes in the first file (default: half of them)")
    args = parser.parse_intermixed_args()
    arrays = build.data(compose(args.overrides))
    require(
        arrays.task == "classification" and isinstance(arrays.inputs, np.ndarray),
        f"{' '.join(args.overrides)}: the samples are not images with one label each, choose another data set",
    )
    number = arrays.num_classes // 2 if args.classes is None else args.classes
    require(
        0 < number < arrays.num_classes,
        f"--classes {number} must be at least 1 and less than {arrays.num_classes}, the number of classes",
    )
    write_classes(args.first, arrays, range(number))
    write_classes(args.second, arrays, range(number, arrays.num_classes))


if __name__ == "__main__":
    main()
