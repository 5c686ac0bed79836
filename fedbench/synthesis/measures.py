"""Measures of synthesized images: Frechet distances with bounds, nearest neighbours, and diversity.

The distance of two images is the root of the mean squared difference of their pixels, which are 0 to 255.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Features = Callable[[np.ndarray], np.ndarray]  # from uint8 images [n, C, H, W] to features [n, d]
Distance = Callable[[np.ndarray, np.ndarray], float]  # of features [n, d] and [m, d]
BATCH = 64  # images whose distances are computed together
SPLITS = 10  # random halves over which Frechet distances are averaged


def bounds(
    real: np.ndarray, synthetic: np.ndarray, features: Features, distance: Distance, rng: np.random.Generator
) -> dict[str, float]:
    """Return Frechet distances of real images, synthesized images and noise to one half of the real images.

    All sets have the same number n of images, because distances depend on n: half the number of real images, or the
    number of synthesized ones if that is smaller.
    Distances are averaged over SPLITS random halves, because a few unusual images can dominate one half.

    Args:
        real: The real images, uint8 [n_real, C, H, W].
        synthetic: The synthesized images, uint8 [n_synthetic, C, H, W].
        features: The function that computes features [n, d] of uint8 images [n, C, H, W].
        distance: The function that computes the Frechet distance of two sets of features.
        rng: The random generator.

    Returns:
        n_fid: n; fid_real: the distance of the other half; fid: of the synthesized images; fid_noise: of normal noise
        with the mean and standard deviation of the real images per channel.  Distances are NaN if n < 2.
    """
    n = min(len(real) // 2, len(synthetic))
    names = ("fid_real", "fid", "fid_noise")
    if n < 2:
        return {"n_fid": n, **dict.fromkeys(names, np.nan)}
    mean, std = (statistic(real, axis=(0, 2, 3), keepdims=True) for statistic in (np.mean, np.std))  # [1, C, 1, 1]
    noise = np.clip(rng.normal(mean, std, (n, *real.shape[1:])).round(), 0, 255).astype(np.uint8)
    real_features, synthetic_features, noise_features = features(real), features(synthetic), features(noise)
    distances = []
    for _ in range(SPLITS):
        order = rng.permutation(len(real))
        base, other_half = real_features[order[:n]], real_features[order[n : 2 * n]]
        sample = synthetic_features[rng.permutation(len(synthetic))[:n]]
        distances.append([distance(base, x) for x in (other_half, sample, noise_features)])
    return {"n_fid": n, **dict(zip(names, np.mean(distances, 0).tolist()))}


def pairwise_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the distances between the images of two sets, for each pair of images.

    The distance is the root of the mean squared difference of the pixels.

    Args:
        a: uint8 [n, C, H, W].
        b: uint8 [m, C, H, W].

    Returns:
        Distances, [n, m] float64.
    """
    x, y = (images.reshape(len(images), -1).astype(np.float64) for images in (a, b))  # [n, pixels], [m, pixels]
    squared = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T  # |x|^2 + |y|^2 - 2 x.y
    return np.sqrt(np.maximum(squared, 0) / x.shape[1])


def nearest_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the distance of each image in a set to the nearest image in another set.

    The distance is the root of the mean squared difference of the pixels.

    Args:
        a: uint8 [n, C, H, W], compared in batches to save memory.
        b: uint8 [m, C, H, W].

    Returns:
        Distances, [n] float64.
    """
    batches = np.split(a, range(BATCH, len(a), BATCH))
    return np.concatenate([pairwise_distances(batch, b).min(1) for batch in batches])


def neighbours(synthetic: np.ndarray, train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Compare distances to the nearest training image, to detect copies of training images.

    Args:
        synthetic: The synthesized images, uint8 [n, C, H, W].
        train: The training images, uint8 [n_train, C, H, W].
        test: Real images that were not trained on, uint8 [n_test, C, H, W].

    Returns:
        nearest: the median distance of synthesized images; nearest_real: that of test images; closer: the fraction of
        synthesized images within the first percentile of the test images' distances, far above 0.01 for copies.
        Without test images, the last two are NaN.
    """
    synthetic_distances = nearest_distances(synthetic, train)
    nearest = float(np.median(synthetic_distances))
    if not len(test):
        return {"nearest": nearest, "nearest_real": np.nan, "closer": np.nan}
    test_distances = nearest_distances(test, train)
    closer = synthetic_distances <= np.quantile(test_distances, 0.01)
    return {"nearest": nearest, "nearest_real": float(np.median(test_distances)), "closer": float(closer.mean())}


def diversity(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean distance of two images of a class, averaged over the classes with at least two images.

    Args:
        images: uint8 [n, C, H, W].
        labels: The class of each image, [n].

    Returns:
        The mean distance, or NaN if no class has two images.
    """
    means = []
    for label in np.unique(labels):
        x = images[labels == label]
        if len(x) > 1:
            means.append(pairwise_distances(x, x).sum() / (len(x) * (len(x) - 1)))  # without distances to itself
    return float(np.mean(means)) if means else float("nan")
