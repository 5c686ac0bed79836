"""Warnings about features with large or very different scales."""

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
RATIO = 1e3  # largest ratio of the standard deviations of two columns without a warning
LARGE = 100  # largest absolute value of float pictures without a warning
MAX_VALUES = 4 << 20  # largest number of values from which statistics are computed


def deviation_ranges(arrays: Arrays, split: Split) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest standard deviation of the columns of each float input [n, F], by input name.

    They are computed from a subset of the training samples.  Constant columns are excluded, and so are inputs that
    have no others.

    Args:
        arrays: The data set.
        split: The samples of each client, of which the training samples are used.
    """
    ranges = {}
    for name, values in arrays.parts().items():
        if values.dtype != np.float32 or values.ndim != 2:
            continue
        std = _subset(arrays, split, name).std(0, dtype=np.float64)  # [F]
        std = std[std > 0]
        if len(std):
            ranges[name] = (float(std.min()), float(std.max()))
    return ranges


def _subset(arrays: Arrays, split: Split, name: str) -> np.ndarray:
    """Return evenly chosen training samples of one input, few enough to have at most MAX_VALUES numbers.

    Args:
        arrays: The data set.
        split: The samples of each client.
        name: The name of the input.

    Returns:
        The samples, [m, ...].
    """
    values, samples = arrays.parts()[name], split.train.indices
    stride = max(1, math.ceil(len(samples) * math.prod(values.shape[1:]) / MAX_VALUES))  # every stride-th sample
    samples = samples[::stride]
    if arrays.shared is not None and name in arrays.shared:  # several samples share an entry of this input
        samples = arrays.shared[name][samples]
    return take(values, np.sort(samples))


def warn_of_scales(arrays: Arrays, split: Split) -> None:
    """Warn if the columns of a float input have very different scales, or if float pictures have large values.

    Scales are very different if their ratio is above RATIO (1,000), for which no learning rate suits all columns.
    Values are large if they are above LARGE (100).

    Args:
        arrays: The data set.
        split: The samples of each client, of which the training samples are used.
    """
    for name, (least, most) in deviation_ranges(arrays, split).items():
        if most > RATIO * least:
            log.warning(
                "the columns of %s have standard deviations from %.2g to %.2g in the training parts, and no learning "
                "rate suits them all: set dataset.normalize=true (with dataset=table_csv), or standardize the columns "
                "in your file (with other data sets)",
                name, least, most,
            )  # fmt: skip
    for name, values in arrays.parts().items():
        if values.dtype == np.float32 and values.ndim > 2:
            subset = _subset(arrays, split, name)
            if max(-subset.min(), subset.max()) > LARGE:
                log.warning(
                    "the values of %s are from %g to %g and not scaled: scale the pictures by "
                    "dataset.window=[low, high], the pixel values of black and white (with dataset=npz), or in your "
                    "file", name, subset.min(), subset.max()
                )  # fmt: skip
