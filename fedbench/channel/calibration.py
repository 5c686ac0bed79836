"""Calibration of the Gaussian mechanism: sigma / Delta for (epsilon, delta), and epsilon of several releases.

References:
    Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, Theorem A.1 (classic).
    Balle and Wang, ICML 2018, Theorem 8 (analytic).
    Bun and Steinke, TCC 2016 (releases add up in rho); Dong, Roth and Su, JRSS-B 2022 (Gaussian releases together are
    one Gaussian release of the summed rho).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def classic_ratio(epsilon: float, delta: float) -> float:
    """Return the noise per sensitivity, sigma / Delta, that makes a Gaussian release (epsilon, delta)-private.

    It is the classical formula sqrt(2 ln(1.25 / delta)) / epsilon, which is proven for epsilon < 1 only.
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def delta_of(epsilon: float, ratio: float) -> float:
    """Return the least delta for which noise of sigma = ratio Delta is (epsilon, delta)-private.

    Args:
        epsilon: Epsilon, >= 0.
        ratio: sigma / Delta, > 0.

    By Balle and Wang, Theorem 8, it is Phi(a) - e^epsilon Phi(-b), with a = 1/(2 ratio) - epsilon ratio and
    b = 1/(2 ratio) + epsilon ratio.  Phi is the normal distribution function, and phi the density.  The second term is
    computed as phi(a) times Mills' ratio of b, which cannot overflow: e^epsilon = phi(a) / phi(b).
    """
    a, b = 1 / (2 * ratio) - epsilon * ratio, 1 / (2 * ratio) + epsilon * ratio
    factor = 0.5 * math.exp(-a * a / 2)  # Phi(-x) = exp(-x^2 / 2) erfcx(x / sqrt(2)) / 2, for either term
    if a > 0:  # _erfcx is for arguments >= 0
        return 0.5 * math.erfc(-a / math.sqrt(2)) - factor * _erfcx(b / math.sqrt(2))
    return factor * (_erfcx(-a / math.sqrt(2)) - _erfcx(b / math.sqrt(2)))


def _erfcx(x: float) -> float:
    """Return exp(x^2) erfc(x) for x >= 0, without the overflow and underflow of its two factors."""
    return float(torch.special.erfcx(torch.tensor(x, dtype=torch.float64)))


def analytic_ratio(epsilon: float, delta: float) -> float:
    """Return the least noise per sensitivity, sigma / Delta, for which a release is (epsilon, delta)-private.

    It is rounded up by at most 1e-12 of its value.
    """
    return _least(lambda ratio: delta_of(epsilon, ratio) <= delta)


def epsilon_of(rho: float, delta: float) -> float:
    """Return the least epsilon, rounded up, of several Gaussian releases at this delta.

    Args:
        rho: The sum of Delta^2 / (2 sigma^2) over the releases.
        delta: Delta of all releases together.

    Returns:
        Epsilon; 0 if even epsilon = 0 has at most this delta.
    """
    if rho == 0:
        return 0.0
    ratio = 1 / math.sqrt(2 * rho)  # sigma / Delta of one release with the same rho
    if delta_of(0, ratio) <= delta:
        return 0.0
    return _least(lambda epsilon: delta_of(epsilon, ratio) <= delta)


def _least(holds: Callable[[float], bool]) -> float:
    """Return the smallest x > 0 for which holds(x), by bisection with a relative error of at most 1e-12, rounded up.

    Args:
        holds: A condition that is false below some x, and true above it.
    """
    low = high = 1.0
    while not holds(high):  # double until the condition holds
        high *= 2
    while holds(low):  # halve until it does not
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
