"""A warning for features that nobody has scaled."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from fedbench.core.mapped import take
from fedbench.data.base import Arrays

if TYPE_CHECKING:
    from fedbench.core.split import Split

log = logging.getLogger(__name__)
RATIO = 1e3  # of the largest to the smallest standard deviation; a larger ratio causes a warning
LARGE = 100  # values of float pictures above this cause a warning
NUMBERS = 4 << 20  # that are looked at


def scales(arrays: Arrays, split: Split) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest standard deviation among the columns of each float input [n, F].

    Constant columns are excluded.  A part of the training samples is used.
    """
    found = {}
    for name, values in arrays.parts().items():
        if values.dtype != np.float32 or values.ndim != 2:
            continue
        std = _some(arrays, split, name).std(0, dtype=np.float64)  # [F]
        std = std[std > 0]
        if len(std):
            found[name] = (float(std.min()), float(std.max()))
    return found


def _some(arrays: Arrays, split: Split, name: str) -> np.ndarray:
    """Return at most NUMBERS numbers of an input (at least one sample), evenly spaced in the training parts."""
    values, rows = arrays.parts()[name], split.train.indices
    rows = rows[:: max(1, -(-len(rows) * math.prod(values.shape[1:]) // NUMBERS))]
    rows = rows if arrays.shared is None or name not in arrays.shared else arrays.shared[name][rows]
    return take(values, np.sort(rows))


def warn_of_scales(arrays: Arrays, split: Split) -> None:
    """Warn if the columns of a float input have very different scales, or if float pictures have large values.

    No learning rate suits columns of very different scales.
    """
    for name, (least, most) in scales(arrays, split).items():
        if most > RATIO * least:
            log.warning(
                "the columns of %s have standard deviations from %.2g to %.2g in the training parts, and no learning "
                "rate suits them all: dataset.normalize=true standardizes a table (dataset=table_csv); other files "
                "are taken as they are",
                name,
                least,
                most,
            )
    for name, values in arrays.parts().items():
        if values.dtype == np.float32 and values.ndim > 2:
            some = _some(arrays, split, name)
            if max(-some.min(), some.max()) > LARGE:
                log.warning(
                    "the values of %s go from %g to %g and are taken as they are: dataset.window=[low, high] scales "
                    "pictures (dataset=npz)", name, some.min(), some.max()
                )  # fmt: skip
