"""Total variation denoising of one row g [d], which makes neighbouring values of the result v equal.

    v = argmin_v 0.5 ||v - g||^2 + gamma (sum_{k<d} |v_k - v_{k+1}| + |v_d|).

`exact` is Johnson's dynamic program (J. Comput. Graph. Stat. 2013), whose time and memory are linear in d.  Let f_k(b)
be the minimal cost of v_1 .. v_k with v_k = b.  Its derivative is piecewise linear.  A step clips it to
[-gamma, gamma], at the points lo_k and hi_k, and adds b - g_{k+1}.  The solution follows backwards: v_k = v_{k+1}
clipped to [lo_k, hi_k], starting at v_{d+1} = 0.  `smoothed` is the smoothing of pFedNet's released code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np

log = logging.getLogger(__name__)
Row = np.ndarray  # [d] float64


def largest_gamma(g: Row) -> float:
    """Return the smallest gamma for which `exact(g, gamma)` is 0.

    It is the largest |g_1 + ... + g_k| for k = 1 .. d, and 0 for an empty row.
    """
    return float(np.abs(np.cumsum(g)).max(initial=0.0))


def exact(g: Row, gamma: float) -> Row:
    """Return the row v that minimizes 0.5 ||v - g||^2 plus gamma times the total variation of v followed by a 0.

    Args:
        g: The row to denoise.  # [d]
        gamma: Weight of the total variation; a copy of g is returned if it is at most 0.

    Returns:
        The minimizer, which is piecewise constant.  # [d]
    """
    if gamma <= 0 or not len(g):
        return g.copy()
    low, high = np.empty(len(g)), np.empty(len(g))  # bounds of v_k given v_{k+1}
    knots = np.empty((3, 2 * len(g)))  # position, change of slope and change of intercept of each knot
    v = np.empty(len(g))
    _compiled_solve()(g, gamma, low, high, knots[0], knots[1], knots[2], v)  # writes v
    return v


@functools.cache
def _compiled_solve() -> Callable[..., None]:
    """Return `_solve` compiled by numba, with the same arguments.

    Without numba, log how to install it, and return the slow Python function `_solve` itself.
    """
    try:
        import numba
    except ImportError:
        log.info("compression=cer takes seconds for a million numbers without numba: pip install 'fedbench-pfl[fast]'")
        return _solve
    return numba.njit(nogil=True)(_solve)


# compiled by numba; without numba, Python runs it
def _solve(g, gamma, low, high, position, slope, intercept, v):  # type: ignore[no-untyped-def]
    """Minimize 0.5 ||v - g||^2 plus gamma times the total variation, by Johnson's dynamic program, and write v.

    f_k(b) is the minimal cost of v_1 .. v_k with v_k = b.  Its derivative f_k' is piecewise linear, with knots where
    its slope changes.  It is -gamma at b = low[k] and gamma at high[k].  Then v_k is v_{k+1}, clipped to these bounds.

    Args:
        g: The row.  # [d]
        gamma: Weight of the total variation, > 0.
        low: Buffer for the lower bounds low[k].  # [d]
        high: Buffer for the upper bounds high[k].  # [d]
        position: Buffer for the knots of f_k': position[first .. last], which grows to both sides.  # [2 d]
        slope: Change of the slope of f_k' at each knot, from left to right.  # [2 d]
        intercept: Change of the intercept of f_k' at each knot, from left to right.  # [2 d]
        v: Buffer for the result.  # [d]
    """
    d = len(g)
    # left_ and right_: the line of f_k' before its first knot, and behind its last one
    first, last = d, d - 1  # no knots
    for k in range(d):
        if k == 0:  # f_1' = b - g_1 is not clipped
            left_slope, left_intercept, right_slope, right_intercept = 1.0, -g[0], 1.0, -g[0]
        else:  # the clipped ends -gamma and gamma, plus the new term
            left_slope, left_intercept, right_slope, right_intercept = 1.0, -gamma - g[k], 1.0, gamma - g[k]
        while first <= last and left_slope * position[first] + left_intercept < -gamma:
            left_slope, left_intercept = left_slope + slope[first], left_intercept + intercept[first]
            first += 1
        low[k] = (-gamma - left_intercept) / left_slope
        while last >= first and right_slope * position[last] + right_intercept > gamma:
            right_slope, right_intercept = right_slope - slope[last], right_intercept - intercept[last]
            last -= 1
        high[k] = (gamma - right_intercept) / right_slope
        first -= 1  # new knots at both bounds, beyond which the clipped f_k' is constant
        position[first], slope[first], intercept[first] = low[k], left_slope, left_intercept + gamma
        last += 1
        position[last], slope[last], intercept[last] = high[k], -right_slope, gamma - right_intercept
    b = 0.0  # the value after the last one, then v_{k+1}
    for k in range(d - 1, -1, -1):
        b = min(max(b, low[k]), high[k])
        v[k] = b


def smoothed(g: Row, k: float, times: int) -> Row:
    """Smooth a row linearly: return (I + k L^T L)^-times g, clipped to the range of g.

    L v are the differences v_k - v_{k+1} of neighbours, and v_d.  pFedNet's released code smooths so, which makes no
    values equal.

    Args:
        g: The row.  # [d]
        k: Step size times gamma.
        times: Number of smoothing steps.

    Returns:
        The smoothed row.  # [d]
    """
    from scipy.linalg import cho_solve_banded, cholesky_banded

    bands = np.empty((2, len(g)))  # I + k L^T L is tridiagonal: the entries above the diagonal, and the diagonal
    bands[0], bands[1] = -k, 1 + 2 * k
    bands[1, 0] = 1 + k  # the first value has one neighbour
    factor, v = cholesky_banded(bands), g
    for _ in range(times):
        v = cho_solve_banded((factor, False), v)  # False: the upper factor
    return v.clip(g.min(), g.max())


def differences(v: Row) -> Row:
    """Return the d differences v_k - v_{k+1} of neighbours in v [d]; the last one is v_d - 0.  # [d]"""
    return v - np.append(v[1:], 0.0)


def transposed(u: Row) -> Row:
    """Return the d differences u_k - u_{k-1} of neighbours in u [d]; the first one is u_1 - 0.  # [d]"""
    return u - np.insert(u[:-1], 0, 0.0)
