"""Coloured digits in five styles: what a small CLIP can be pre-trained on and prompted for, without a download.

scikit-learn's 8x8 digits, by a fixed permutation 900 for pre-training and 897 for the downstream task.  A digit is
drawn at 32x32 in one of three soft colours and one of five styles; the downstream classes are "red zero" to "blue
nine".  Every held-out digit is drawn in all three colours; half of the digits of each kind are the test part in all of
them, so no digit is in both parts.
"""

from typing import Literal

import numpy as np

from fedbench.core.options import require
from fedbench.data._bundled import bundled_csv
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.images.domain_sets import top_of_list

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue")
STYLES = ("clean", "noisy", "negative", "faded", "rotated")
PRETRAINING = 900  # of the 1,797 digits; the others are downstream
MEAN, STD, NOISE = 0.3, 0.35, 0.35  # of the drawn images; standard deviation of the noisy style


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 digits in a fixed random order: images [n, 32, 32] in [0, 1], bilinear from 8x8, and labels [n]."""
    table = bundled_csv("digits.csv.gz", (1797, 65))
    order = np.random.default_rng(0).permutation(len(table))
    grey = table[order, :-1].reshape(-1, 8, 8).astype(np.float32) / 16
    at = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)  # centres of pixels, as image libraries place them
    low = np.minimum(at.astype(int), 6)
    share = (at - low).astype(np.float32)
    rows = grey[:, low] * (1 - share)[:, None] + grey[:, low + 1] * share[:, None]  # [n, 32, 8]
    return rows[:, :, low] * (1 - share) + rows[:, :, low + 1] * share, table[order, -1].astype(np.int64)


def draw(grey: np.ndarray, colours: np.ndarray, styles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Digits [n, 32, 32] in colours [n] (0 to 2) and styles [n] (0 to 4), scaled.  # [n, 3, 32, 32] float32"""
    paint = np.where(np.eye(3, dtype=bool), 1.0, 0.2).astype(np.float32)  # [3, 3]
    x = grey[:, None] * paint[colours][:, :, None, None]  # [n, 3, 32, 32]
    noise = rng.normal(0, NOISE, x.shape).astype(np.float32)
    drawn = np.stack([x, x + noise, 1 - x, 0.3 * x + 0.35, np.rot90(x, axes=(2, 3))])  # [5, n, ...]
    return (drawn[styles, np.arange(len(x))] - MEAN) / STD


class DigitsCLIP:
    """style: one of the five, or all: a natural silo each.

    label_pairing: official_bug, with style=all, repeats the mistakes told in domain_sets.py.
    """

    def __init__(
        self,
        style: Literal["noisy", "clean", "negative", "faded", "rotated", "all"] = "noisy",
        label_pairing: Literal["correct", "official_bug"] = "correct",
    ):
        self.style, self.label_pairing = style, label_pairing

    def load(self) -> Arrays:
        """The arrays described above."""
        grey, label = (part[PRETRAINING:] for part in digits())
        styles = range(len(STYLES)) if self.style == "all" else [STYLES.index(self.style)]
        test = np.zeros(len(label), bool)
        for kind in range(10):
            members = np.flatnonzero(label == kind)
            test[members[: len(members) // 2]] = True
        cells = [(c, s) for s in styles for c in range(3)]  # style-major
        images = [
            draw(grey, np.full(len(grey), c), np.full(len(grey), s), np.random.default_rng([1, c, s])) for c, s in cells
        ]
        targets = [10 * c + label for c, _ in cells]
        arrays = Arrays(
            np.concatenate(images),
            np.concatenate(targets),
            np.tile(np.where(test, TEST, TRAIN).astype(np.int8), len(cells)),
            30,
            class_names=[f"{c} {d}" for c in COLOURS for d in DIGITS],
        )
        if self.style == "all":
            arrays.domain = np.repeat(np.arange(len(STYLES)), 3 * len(label))
            arrays.domain_names = list(STYLES)
        return mispaired(arrays) if self.label_pairing == "official_bug" else arrays.check()


def mispaired(arrays: Arrays) -> Arrays:
    """Each client's k-th sample shows the k-th image of its silo, and the class names are in another order."""
    require(arrays.domain is not None, "dataset.label_pairing=official_bug needs natural silos: dataset.style=all")
    assert arrays.class_names is not None and arrays.domain is not None
    wrong = np.random.default_rng(0).permutation(arrays.num_classes)
    arrays.class_names = [arrays.class_names[i] for i in wrong]
    arrays.fit = top_of_list(arrays.domain, arrays.split, np.arange(len(arrays)))
    return arrays.check()
