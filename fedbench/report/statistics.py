"""Statistics of comparisons, as functions of arrays: paired over seeds, and ranks over settings (data sets ...).

Letters of shapes: S seeds, N clients, M settings, K methods.

References:
    Rosner, Glynn and Lee, The Wilcoxon signed rank test for paired comparisons of clustered data, Biometrics 2006.
    Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 1979.
    Demsar, Statistical comparisons of classifiers over multiple data sets, JMLR 2006.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

LEVEL = 0.05
MIN_SEEDS = 5  # of a test and of an interval
RESAMPLES = 9_999  # of the bootstrap
FLIPS = 100_000  # of signs; with at most this many combinations of signs, all are computed
DECIMALS = 12  # values are equal if they agree in this many decimal places


def bootstrap_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean by the percentile bootstrap over seeds.

    Args:
        differences: A difference for each seed [S].
    """
    interval = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=1 - LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def signed_rank_sums(differences: np.ndarray) -> np.ndarray:
    """Return the sum of signed ranks of each seed.

    Args:
        differences: The clients' differences [..., S, N].  Zeros and NaN are left out.

    Returns:
        The sums [..., S].  The ranks are those of absolute values, over all clients of all seeds.
    """
    values = np.round(np.nan_to_num(differences), DECIMALS)
    sizes = np.abs(values).reshape(*values.shape[:-2], -1)  # [..., S * N]
    zeros = (sizes == 0).sum(axis=-1, keepdims=True)  # their ranks are the lowest ones
    ranks = stats.rankdata(sizes, axis=-1) - zeros
    return (np.sign(values) * ranks.reshape(values.shape)).sum(axis=-1)


def signed_rank_p(differences: np.ndarray) -> np.ndarray:
    """Return the two-sided p of the signed-rank test clustered by seed.

    If two methods do not differ, all differences of a seed may change their signs together.  The clients of a seed
    may be correlated.  The distribution of the sum of signed ranks is exact if all 2^S signs are computed.

    Args:
        differences: The clients' differences [..., S, N].  Zeros and NaN are left out.

    Returns:
        The values of p [...].

    References:
        Rosner, Glynn and Lee, Biometrics 2006.
    """
    test = stats.permutation_test(
        (signed_rank_sums(differences),),
        np.sum,
        permutation_type="samples",  # of one sample: random signs
        vectorized=True,
        axis=-1,
        n_resamples=FLIPS,  # random signs, if there are more than FLIPS combinations
        batch=1_000,
        rng=np.random.default_rng(0),
    )
    return np.asarray(test.pvalue)


def smallest_p(seeds: int) -> float:
    """Return the smallest two-sided p-value that a sign-flip test over so many seeds can have, 2 / 2^seeds."""
    return 2 / 2**seeds


def seeds_needed(comparisons: int) -> int:
    """Return the number of seeds with which a p after Holm's correction can be at most 0.05.

    Args:
        comparisons: The number of comparisons of the correction.
    """
    # the least p of a two-sided sign-flip test of S seeds is 2 / 2^S, and Holm multiplies it by the comparisons
    return math.ceil(1 + math.log2(comparisons / LEVEL))


def holm(p: np.ndarray) -> np.ndarray:
    """Return the p-values ``p`` [n] of n comparisons after Holm's correction [n], in the same order."""
    order = np.argsort(p)
    factors = np.arange(len(p), 0, -1)  # n for the smallest p, 1 for the largest
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1)
    return corrected


def standardized_mean(differences: np.ndarray) -> float:
    """Return d_z, the mean difference divided by the sample standard deviation (ddof=1) over seeds.

    Args:
        differences: A difference for each seed [S].

    Returns:
        d_z; NaN for a single seed or equal differences.
    """
    # rounded, so that differences that are equal up to floating-point errors have std = 0
    std = np.round(differences.std(ddof=1), DECIMALS) if len(differences) > 1 else 0
    return float(differences.mean() / std) if std else math.nan


def signs(differences: np.ndarray) -> np.ndarray:
    """Return the sign of each difference, same shape: 1, -1, 0 (also if 0 to 12 decimal places), or NaN for NaN."""
    return np.sign(np.round(differences, DECIMALS))


def ranks(values: np.ndarray, lower_is_better: bool) -> np.ndarray:
    """Return the ranks of methods in each setting [M, K]: 1 for the best; equal methods have their mean rank.

    Args:
        values: The scores of K methods in M settings [M, K].
        lower_is_better: Whether lower scores are better.
    """
    # rounded, so that scores that differ only by floating-point errors are equal
    return stats.rankdata(np.round(values if lower_is_better else -values, DECIMALS), axis=1)


def friedman(ranks: np.ndarray) -> tuple[float, float]:
    """Return statistic and p of Friedman's test, that all methods have equal average ranks.

    Args:
        ranks: The ranks of K >= 3 methods in M settings [M, K].

    Returns:
        The statistic and p.  If all methods are equal in all settings, they are 0 and 1.
    """
    if (ranks == ranks[:, :1]).all():
        return 0.0, 1.0
    result = stats.friedmanchisquare(*ranks.T)
    return float(result.statistic), float(result.pvalue)


def critical_difference(methods: int, settings: int) -> float:
    """Return the difference of average ranks above which the Nemenyi test rejects equality, at level 0.05.

    Args:
        methods: The number of methods K.
        settings: The number of settings M.

    References:
        Demsar, JMLR 2006, Section 3.2.2.
    """
    q = stats.studentized_range.ppf(1 - LEVEL, methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(methods * (methods + 1) / (6 * settings)))


def not_different(average_ranks: np.ndarray, difference: float) -> list[tuple[int, int]]:
    """Return the largest sets of methods whose average ranks differ by at most the critical difference.

    Args:
        average_ranks: The average ranks, ascending [K].
        difference: The critical difference.

    Returns:
        The positions of the first and the last method of each set of at least two methods.
    """
    sets: list[tuple[int, int]] = []
    for first, rank in enumerate(average_ranks):
        last = int(np.searchsorted(average_ranks, rank + difference, side="right")) - 1
        if last > first and (not sets or last > sets[-1][1]):  # else an earlier set contains this one
            sets.append((first, last))
    return sets
