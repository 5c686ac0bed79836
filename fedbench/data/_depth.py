"""Pictures of more than 8 bits per pixel: the range of a data set's values, and scaling to 8 bits (256 LEVELS of grey).

All pictures of a data set are scaled by one window (low, high), the values that become black and white.  Differences
in brightness between pictures thus remain.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.core.options import ConfigError, require

Window = tuple[float, float]  # pixel values (low, high) that become black (0) and white (255)

log = logging.getLogger("fedbench.data")
LEVELS = 256
SAMPLE = 1 << 16  # values of one picture from which its quantiles are estimated
NARROW = 16  # a picture within 1 / NARROW of the range keeps at most LEVELS / NARROW grey levels


@dataclass(frozen=True)
class Range:
    """The range of one picture: smallest and largest value (low, high), 1% and 99% quantile (q01, q99), is_integer.

    Attributes:
        low, high: Minimum and maximum.
        q01, q99: The 1% and 99% quantiles.
        is_integer: Whether all values are integers.
    """

    low: float
    high: float
    q01: float
    q99: float
    is_integer: bool

    @classmethod
    def of(cls, values: np.ndarray, name: str) -> "Range":
        """Return the range of one picture.

        Args:
            values: The pixels, an array of any shape with numbers of any type.
            name: Name of the picture, for the message.

        Raises:
            ConfigError: A pixel is NaN or infinite.
        """
        low, high = float(values.min()), float(values.max())
        require(
            math.isfinite(low) and math.isfinite(high), f"{name} has NaN or infinite values: replace them by numbers"
        )
        # The quantiles are those of every k-th pixel, about SAMPLE (65,536) of them, which is fast.
        subset = np.sort(values.ravel()[:: max(1, values.size // SAMPLE)])
        q01, q99 = (float(subset[int(q * (len(subset) - 1))]) for q in (0.01, 0.99))
        return cls(low, high, q01, q99, is_integer=values.dtype.kind in "iu")


def check_window(window: Sequence[float] | None) -> Window | None:
    """Return the option dataset.window, the pixel values of black and white, as two floats, or None if it is None.

    Raises:
        ConfigError: The option is not [low, high], two finite numbers with low < high.
    """
    if window is None:
        return None
    numbers = [v for v in window if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    fits = len(window) == len(numbers) == 2 and numbers[0] < numbers[1]
    require(
        fits,
        f"dataset.window={list(window)} is no range of pixel values: set it to two finite numbers [low, high] with "
        "low < high, which become black and white, or to null",
    )
    return float(numbers[0]), float(numbers[1])


def common_window(ranges: Sequence[Range], name: str) -> Window:
    """Return and log the window, the pixel values (low, high) that become black and white in all pictures.

    For integers >= 0 it is 0 to the smallest power of two above the maximum, at least 256.  For other numbers in [0, 1]
    it is [0, 1].  For all others it is the smallest and the largest value.

    Args:
        ranges: The range of each picture of more than 8 bits.
        name: The data set, for messages.

    Raises:
        ConfigError: All pixels are equal, or most pictures would keep few of the 256 grey levels.
    """
    low, high = min(r.low for r in ranges), max(r.high for r in ranges)
    require(
        low < high,
        f"all pixels of the pictures with more than 8 bits in {name} have the value {low:g}: replace these files",
    )
    window = (low, high)
    if low >= 0 and all(r.is_integer for r in ranges):
        window = (0.0, float(max(LEVELS, 1 << int(high).bit_length())))
    elif low >= 0 and high <= 1:
        window = (0.0, 1.0)
    shown = f"[{window[0]:g}, {window[1]:g}]"
    margin = (window[1] - window[0]) / NARROW  # a 16th of the window, which becomes LEVELS / NARROW = 16 grey levels
    dark = [r for r in ranges if r.q99 < window[0] + margin]  # 99% of the pixels are nearly black
    bright = [r for r in ranges if r.q01 > window[1] - margin]  # 99% of the pixels are nearly white
    narrow = max(dark, bright, key=len)  # pictures that use a small part of the window
    finding = (
        f"{name}: scaled by the range {shown}, {len(narrow):,} of {len(ranges):,} pictures of more than 8 bits become "
        f"nearly black or white, with at most {LEVELS // NARROW} of {LEVELS} grey levels"
    )
    if 2 * len(narrow) > len(ranges):
        q01, q99 = np.median([(r.q01, r.q99) for r in narrow], axis=0)
        raise ConfigError(
            f"{finding}. Set dataset.window=[low, high] to the values of black and white, which are from {q01:g} to "
            f"{q99:g} in most of these pictures, or to {shown}; without this option, save them with 8 bits"
        )
    if narrow:
        log.warning("%s: set dataset.window=[low, high] for another range", finding)
    log.info(
        "%s: %s pictures have more than 8 bits, with values from %g to %g; %s becomes black to white "
        "(dataset.window sets another range)", name, f"{len(ranges):,}", low, high, shown
    )  # fmt: skip
    return window


def to_eight_bits(values: np.ndarray, window: Window) -> np.ndarray:
    """Return pixel values as uint8 in an array of the same shape.

    The window (low, high) is divided into 256 equal steps.  Values outside become 0 or 255.
    """
    low, high = window
    levels = np.floor((values.astype(np.float64) - low) * (LEVELS / (high - low)))
    return levels.clip(0, LEVELS - 1).astype(np.uint8)
