"""Pictures of more than 8 bits: the range of a data set's values, and scaling to 8 bits.

All pictures of a set are scaled by one window (low, high), which preserves differences in brightness between them.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.core.options import ConfigError, require

Window = tuple[float, float]

log = logging.getLogger("fedbench.data")
LEVELS = 256
SAMPLE = 1 << 16  # values of one picture from which its quantiles are estimated
NARROW = 16  # a picture within this share of the range keeps at most LEVELS / NARROW grey levels


@dataclass(frozen=True)
class Span:
    """Range of one picture: minimum, maximum, the 1% and 99% quantiles, and whether all values are integers."""

    least: float
    most: float
    low: float
    high: float
    whole: bool

    @classmethod
    def of(cls, values: np.ndarray, name: str) -> "Span":
        """Return the span of a picture's values; ConfigError if one is not finite."""
        least, most = float(values.min()), float(values.max())
        require(math.isfinite(least) and math.isfinite(most), f"{name} holds values that are not finite")
        some = np.sort(values.ravel()[:: max(1, values.size // SAMPLE)])
        low, high = (float(some[int(share * (len(some) - 1))]) for share in (0.01, 0.99))
        return cls(least, most, low, high, values.dtype.kind in "iu")


def check_window(window: Sequence[float] | None) -> Window | None:
    """Return dataset.window as two numbers; ConfigError unless it is null or [low, high] with low < high."""
    if window is None:
        return None
    numbers = [v for v in window if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    fits = len(window) == len(numbers) == 2 and numbers[0] < numbers[1]
    require(fits, f"dataset.window={list(window)} must be null or [low, high], two numbers with low < high")
    return float(numbers[0]), float(numbers[1])


def common_window(spans: Sequence[Span], name: str) -> Window:
    """Return and log the range by which all pictures of a set are scaled.

    Integers >= 0 run up to the smallest power of two above the maximum, at least 256.  Fractions of 1 run from 0 to 1.
    All others run from the minimum to the maximum.

    Raises:
        ConfigError: Most pictures would keep few grey levels.
    """
    least, most = min(s.least for s in spans), max(s.most for s in spans)
    if least >= 0 and all(s.whole for s in spans):
        window = 0.0, float(max(LEVELS, 1 << int(most).bit_length()))
    elif least >= 0 and most <= 1:
        window = 0.0, 1.0
    else:
        window = least, most
    shown = f"[{window[0]:g}, {window[1]:g}]"
    require(least < most, f"{name}: all pixels of its pictures of more than 8 bits are {least:g}")
    margin = (window[1] - window[0]) / NARROW
    dark = [s for s in spans if s.high < window[0] + margin]
    bright = [s for s in spans if s.low > window[1] - margin]
    narrow = max(dark, bright, key=len)
    said = (
        f"{name}: {len(narrow):,} of {len(spans):,} pictures of more than 8 bits keep at most {LEVELS // NARROW} grey "
        f"levels in the range {shown} of all of them"
    )
    if 2 * len(narrow) > len(spans):
        low, high = np.median([(s.low, s.high) for s in narrow], axis=0)
        raise ConfigError(
            f"{said}: set dataset.window=[low, high] to the values that are to be black and white, or to {shown} to "
            f"take them so (most of these pictures lie near {low:g} to {high:g}); where there is no such option, save "
            "the pictures with 8 bits, or arrays as float32 to keep their numbers"
        )
    if narrow:
        log.warning("%s: dataset.window=[low, high] sets another", said)
    log.info(
        "%s: %s pictures have more than 8 bits, with values from %g to %g; %s becomes black to white "
        "(dataset.window sets another range)", name, f"{len(spans):,}", least, most, shown
    )  # fmt: skip
    return window


def to_eight_bits(values: np.ndarray, window: Window) -> np.ndarray:
    """Return values as uint8: [low, high] is cut into 256 steps of equal width, and values outside are clipped."""
    low, high = window
    levels = np.floor((values.astype(np.float64) - low) * (LEVELS / (high - low)))
    return levels.clip(0, LEVELS - 1).astype(np.uint8)
