"""Pictures for training only (synthesized ones, say), put beside a data set of pictures."""

from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data.base import EXTRA, Arrays


def extra_path(source: str, or_table: bool = False) -> Path:
    """Return the path of dataset.extra; ConfigError if no such file or folder exists."""
    path = Path(source)
    kinds = "a folder of pictures, silo/class/picture" + (", or a CSV file" if or_table else "")
    require(path.is_dir() or (or_table and path.is_file()), f"dataset.extra={source} is not there: it names {kinds}")
    return path


def join_extra(arrays: Arrays, extra: Arrays, source: str) -> Arrays:
    """The data set with the images of another, matched by the names of classes and silos, for training only."""
    require(arrays.task == extra.task == "classification", f"dataset.extra={source} needs one label a picture")
    targets = _renumbered(extra.class_names, arrays.class_names, "class", source)[extra.targets]
    domain = _renumbered(extra.domain_names, arrays.domain_names, "natural silo", source)[extra.domain]
    new = len(extra)
    arrays.inputs = np.concatenate([arrays.inputs, extra.inputs])  # type: ignore[arg-type]
    arrays.targets = np.concatenate([arrays.targets, targets])
    arrays.domain = np.concatenate([arrays.domain, domain])  # type: ignore[arg-type]
    arrays.split = np.concatenate([arrays.split, np.full(new, EXTRA, np.int8)])
    if arrays.subject is not None:  # nobody's images: each a subject of its own
        arrays.subject = np.concatenate([arrays.subject, arrays.subject.max() + 1 + np.arange(new)])
    return arrays


def _renumbered(theirs: list[str] | None, ours: list[str] | None, what: str, source: str) -> np.ndarray:
    """Our number of each of their names."""
    if theirs is None or ours is None:
        raise ConfigError(f"dataset.extra={source} needs the {what} of every picture, there and in the data set")
    odd = [name for name in theirs if name not in ours]
    if odd:
        raise ConfigError(f"dataset.extra={source} names the {what} {odd[0]}, but the data set has {', '.join(ours)}")
    return np.array([ours.index(name) for name in theirs], np.int64)
