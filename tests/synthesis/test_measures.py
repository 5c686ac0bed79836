"""Bounds, neighbours and diversity on images whose values are known."""

from __future__ import annotations

import numpy as np
import pytest

from fedbench.synthesis.measures import bounds, diversity, nearest_distances, neighbours, pairwise_distances
from fedbench.tools.fid import frechet


def flat(*levels: int) -> np.ndarray:
    """Pictures [n, 1, 2, 2] of one grey level each."""
    return np.array(levels, np.uint8)[:, None, None, None].repeat(2, 2).repeat(2, 3)


def test_distances_are_in_grey_levels() -> None:
    np.testing.assert_allclose(pairwise_distances(flat(0, 10), flat(0, 4, 255)), [[0, 4, 255], [10, 6, 245]], atol=1e-9)


def test_copies_are_detected() -> None:
    train, held_out = flat(0, 100, 200), flat(10, 120, 170)  # 10, 20 and 30 away
    assert neighbours(train, train, held_out) == pytest.approx({"nearest": 0, "nearest_real": 20, "closer": 1})
    some = neighbours(flat(0, 150, 100, 201), train, held_out)  # copies, and one a grey level away
    assert some["closer"] == pytest.approx(0.75)
    twins = neighbours(train, train, flat(0, 100, 120))  # test images that are training images, too
    assert twins["closer"] == 1
    far = neighbours(flat(50, 150, 140), train, held_out)
    assert far["nearest"] == pytest.approx(50) and far["closer"] == 0


def test_the_nearest_of_many_is_found_in_parts() -> None:
    levels = np.random.default_rng(0).integers(0, 256, 150)
    expected = [min(abs(int(level) - other) for other in (0, 60, 200)) for level in levels]
    np.testing.assert_allclose(nearest_distances(flat(*levels), flat(0, 60, 200)), expected, atol=1e-6)


def test_diversity_is_within_classes() -> None:
    """Class 0: 10 apart; class 1: 30 apart; class 2 has one image alone."""
    assert diversity(flat(0, 10, 100, 130, 255), np.array([0, 0, 1, 1, 2])) == pytest.approx(20)
    assert np.isnan(diversity(flat(1), np.array([0])))


def test_bounds_hold_for_more_of_the_same_and_for_noise() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2, (120, 1, 1, 1)) * 100 + 50  # images dark or light, with a little noise
    real = (base + rng.integers(0, 9, (120, 1, 4, 4))).astype(np.uint8)

    def features(images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), -1)[:, :4].astype(float)

    same = bounds(real, real[:40], features, frechet, np.random.default_rng(1))
    assert same["n_fid"] == 40 and same["fid"] < same["fid_noise"] and same["fid_real"] < same["fid_noise"]
    black = bounds(real, real[:40] * 0, features, frechet, np.random.default_rng(1))
    assert black["fid"] > 10 * same["fid"] and black["fid_real"] == same["fid_real"]


def test_bounds_are_means_over_ten_halves_of_the_real_images() -> None:
    """Each of two halves that share no image; a distance that counts its calls tells which are averaged."""
    halves = []

    def counted(a: np.ndarray, b: np.ndarray) -> float:
        halves.append((set(a[:, 0]), set(b[:, 0])))
        return float(len(halves))

    real, made = flat(*range(40)), flat(*range(100, 110))
    found = bounds(real, made, lambda x: x.reshape(len(x), -1)[:, :1].astype(float), counted, np.random.default_rng(0))
    assert found == {"n_fid": 10, "fid_real": 14.5, "fid": 15.5, "fid_noise": 16.5}  # calls 1, 4, ..., 28, and so on
    assert all(not a & b and len(a) == len(b) == 10 for a, b in halves[::3])
    assert all(b == set(range(100, 110)) for _, b in halves[1::3]) and len({frozenset(a) for a, _ in halves}) == 10


def test_too_few_images_give_nan() -> None:
    alone = neighbours(flat(3, 5), flat(1), flat())
    assert alone["nearest"] == 3 and np.isnan([alone["nearest_real"], alone["closer"]]).all()
    few = bounds(flat(1, 2, 3), flat(4, 5), lambda x: x.reshape(len(x), -1), frechet, np.random.default_rng(0))
    assert few.pop("n_fid") == 1 and len(few) == 3 and np.isnan(list(few.values())).all()
