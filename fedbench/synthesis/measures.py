"""How far synthesized pictures are from a client's own: Frechet distances with their bounds, neighbours, diversity.

Distances between pictures are roots of the mean squared difference of pixels, in grey levels of 0 to 255.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Features = Callable[[np.ndarray], np.ndarray]  # uint8 pictures [n, C, H, W] -> [n, d]
Distance = Callable[[np.ndarray, np.ndarray], float]  # features [n, d], [m, d]
AT_ONCE = 64  # pictures whose distances to all others are held
HALVINGS = 10  # over which bounds are averaged


def bounds(
    real: np.ndarray, made: np.ndarray, features: Features, distance: Distance, rng: np.random.Generator
) -> dict[str, float]:
    """Frechet distances to one half of the real pictures: of the other half (fid_real), of synthesized ones (fid) and
    of noise with the real pictures' mean and deviation per channel (fid_noise); n pictures on every side, n the
    smaller of half the real and all the synthesized, since fewer pictures mean larger distances.

    Means over HALVINGS divisions of the real pictures: of one alone, a few odd pictures in one half may raise
    fid_real of a small client above fid.  NaN where n is below 2.
    """
    n, names = min(len(real) // 2, len(made)), ("fid_real", "fid", "fid_noise")
    if n < 2:
        return {"n_fid": n, **dict.fromkeys(names, np.nan)}
    mean, std = (f(real, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    noise = np.clip(rng.normal(mean, std, (n, *real.shape[1:])).round(), 0, 255).astype(np.uint8)
    theirs, ours, theirs_noisy = features(real), features(made), features(noise)
    each = []
    for _ in range(HALVINGS):
        order = rng.permutation(len(real))
        base, other = theirs[order[:n]], theirs[order[n : 2 * n]]
        each.append([distance(base, x) for x in (other, ours[rng.permutation(len(made))[:n]], theirs_noisy)])
    return {"n_fid": n, **dict(zip(names, np.mean(each, 0).tolist()))}


def pairwise(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distances of pictures a [n, C, H, W] to b [m, C, H, W].  # [n, m]"""
    x, y = (p.reshape(len(p), -1).astype(np.float64) for p in (a, b))
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return np.sqrt(np.maximum(squared, 0) / x.shape[1])


def nearest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of each picture of a [n, C, H, W] to the nearest of b [m, C, H, W], few at a time.  # [n]"""
    return np.concatenate([pairwise(some, b).min(1) for some in np.split(a, range(AT_ONCE, len(a), AT_ONCE))])


def neighbours(made: np.ndarray, train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """nearest, nearest_real: median distance to the nearest training picture, of synthesized pictures and of real ones
    that were not trained on.  closer: the share of synthesized pictures that are as near to a training picture as the
    nearest 1% of those real ones are; copies would raise it far above 0.01.  NaN where there are no such pictures."""
    ours = nearest(made, train)
    if not len(held_out):
        return {"nearest": float(np.median(ours)), "nearest_real": np.nan, "closer": np.nan}
    theirs = nearest(held_out, train)
    return {
        "nearest": float(np.median(ours)),
        "nearest_real": float(np.median(theirs)),
        "closer": float((ours <= np.quantile(theirs, 0.01)).mean()),  # copies are at 0, as twins in the data are
    }


def diversity(pictures: np.ndarray, labels: np.ndarray) -> float:
    """Mean distance between two different pictures of one class, mean over classes of two pictures or more."""
    each = []
    for label in np.unique(labels):
        mine = pictures[labels == label]
        if len(mine) > 1:
            each.append(pairwise(mine, mine).sum() / (len(mine) * (len(mine) - 1)))
    return float(np.mean(each)) if each else float("nan")
