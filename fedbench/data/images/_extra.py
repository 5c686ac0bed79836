"""Append pictures for training only, such as synthesized ones, to a data set of pictures."""

from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, require
from fedbench.data._names import positions
from fedbench.data.base import EXTRA, Arrays


def extra_path(extra: str, may_be_table: bool = False) -> Path:
    """Return the option dataset.extra as a path, after a check that it exists.

    Args:
        extra: The value of dataset.extra, a path.
        may_be_table: Whether a CSV file is allowed.

    Raises:
        ConfigError: The file or folder does not exist.
    """
    path = Path(extra)
    allowed = "a folder silo/class/picture" + (" or a CSV file" if may_be_table else "")
    require(
        path.is_dir() or (may_be_table and path.is_file()),
        f"dataset.extra={extra} does not exist: set it to {allowed}, or to null for no extra pictures",
    )
    return path


def join_extra(arrays: Arrays, extra: Arrays, source: str) -> Arrays:
    """Append pictures for training only to a data set, matched by the names of classes and natural clients (hospitals).

    Args:
        arrays: The data set, which is changed.
        extra: The pictures, with their own indices of classes and natural clients.
        source: The value of dataset.extra, for messages.

    Returns:
        The data set.

    Raises:
        ConfigError: A class or natural client is not in the data set.
    """
    require(
        arrays.task == extra.task == "classification",
        f"dataset.extra={source} needs one label for each picture, there and in the data set: set dataset.extra to "
        "null for multi-label data",
    )
    targets = _indices(extra.class_names, arrays.class_names, "class", source)[extra.targets]
    domain = _indices(extra.domain_names, arrays.domain_names, "silo (natural client)", source)[extra.domain]
    count = len(extra)
    arrays.inputs = np.concatenate([arrays.inputs, extra.inputs])  # type: ignore[arg-type]
    arrays.targets = np.concatenate([arrays.targets, targets])
    arrays.domain = np.concatenate([arrays.domain, domain])  # type: ignore[arg-type]
    arrays.split = np.concatenate([arrays.split, np.full(count, EXTRA, np.int8)])
    if arrays.subject is not None:  # each extra picture is a new patient
        arrays.subject = np.concatenate([arrays.subject, arrays.subject.max() + 1 + np.arange(count)])
    return arrays


def _indices(extra: list[str] | None, names: list[str] | None, what: str, source: str) -> np.ndarray:
    """Return the index of each name of the extra pictures in the names of the data set.

    Args:
        extra: The class names (or the names of the natural clients) of the extra pictures.
        names: Those of the data set.
        what: What they name, for messages, as in "class".
        source: The value of dataset.extra, for messages.

    Returns:
        Indices, one for each name in ``extra``, int64.

    Raises:
        ConfigError: There are no names, or one is not in the data set.
    """
    if extra is None or names is None:
        raise ConfigError(
            f"dataset.extra={source} needs the name of the {what} of each picture, there and in the data set: use a "
            "data set with natural clients, or set dataset.extra to null"
        )
    unknown = [name for name in extra if name not in names]
    if unknown:
        raise ConfigError(
            f"dataset.extra={source} has the {what} {unknown[0]}, but the data set has {', '.join(names)}: rename it, "
            "or remove its pictures"
        )
    return positions(extra, names)
