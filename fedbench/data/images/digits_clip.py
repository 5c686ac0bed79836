"""Coloured digits in five styles, to pre-train a small CLIP and to learn prompts for it without a download.

scikit-learn's 8x8 digits, by a fixed permutation: 900 for pre-training and 897 for the downstream task.  A digit is
rendered at 32x32 in one of three soft colours and one of five styles.  The downstream classes are "red zero" to "blue
nine".  Each downstream digit is rendered in all three colours.  Half of the digits of each class are the test part, so
that no digit is in both parts.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbench.core.options import require
from fedbench.data._bundled import bundled_csv
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.images.domain_sets import images_from_top

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue")
STYLES = ("clean", "noisy", "negative", "faded", "rotated")
PRETRAINING = 900  # of the 1,797 digits; the others are downstream
MEAN, STD = 0.3, 0.35  # of the rendered images
NOISE = 0.35  # standard deviation of the noisy style


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the 1,797 digits in a fixed random order.

    Returns:
        Images [n, 32, 32] in [0, 1], bilinear from 8x8, and labels [n] int64.
    """
    table = bundled_csv("digits.csv.gz", (1797, 65))
    order = np.random.default_rng(0).permutation(len(table))
    grey = table[order, :-1].reshape(-1, 8, 8).astype(np.float32) / 16
    # Positions of the 32 pixels' centres in the 8x8 image, as in image libraries.
    position = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    low = np.minimum(position.astype(int), 6)  # the pixel before each position; the next one is low + 1
    weight = (position - low).astype(np.float32)  # of the next pixel
    # Bilinear interpolation, first along the rows and then along the columns.
    rows = grey[:, low] * (1 - weight)[:, None] + grey[:, low + 1] * weight[:, None]  # [n, 32, 8]
    return rows[:, :, low] * (1 - weight) + rows[:, :, low + 1] * weight, table[order, -1].astype(np.int64)


def render(grey: np.ndarray, colours: np.ndarray, styles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Render digits in colours and styles, and normalize them by MEAN and STD.

    Args:
        grey: Digits [n, 32, 32] in [0, 1].
        colours: Their colours [n], indices of COLOURS.
        styles: Their styles [n], indices of STYLES.
        rng: Generator of the noise.

    Returns:
        Pictures, [n, 3, 32, 32] float32.
    """
    # [3, 3], the channels of each colour: 1 in its own channel and 0.2 in the others, a soft colour
    paint = np.where(np.eye(3, dtype=bool), 1.0, 0.2).astype(np.float32)
    x = grey[:, None] * paint[colours][:, :, None, None]  # [n, 3, 32, 32]
    noise = rng.normal(0, NOISE, x.shape).astype(np.float32)
    # In the order of STYLES: clean, noisy, negative, faded, rotated.
    rendered = np.stack([x, x + noise, 1 - x, 0.3 * x + 0.35, np.rot90(x, axes=(2, 3))])  # [5, n, ...]
    return (rendered[styles, np.arange(len(x))] - MEAN) / STD


@dataclass
class DigitsCLIP:
    """The digits that are not used for pre-training: inputs [n, 3, 32, 32] float32, targets [n] in 0..29.

    Args:
        style: One of the five styles, or all, with a natural client for each.
        label_pairing: correct, or official_bug, which repeats the mistakes described in `domain_sets.py` and needs
            style=all.
    """

    style: Literal["noisy", "clean", "negative", "faded", "rotated", "all"] = "noisy"
    label_pairing: Literal["correct", "official_bug"] = "correct"

    def load(self) -> Arrays:
        """Return the 897 digits that are not used for pre-training, each in three colours and in one or all styles.

        The first half of the images of each digit is the test part.  The classes are pairs of colour and digit.  With
        the option style=all, each style is a natural client.
        """
        grey, label = (array[PRETRAINING:] for array in digits())  # images [n, 32, 32], and digits 0 to 9 [n]
        is_test = np.zeros(len(label), bool)
        for digit in range(10):
            members = np.flatnonzero(label == digit)
            is_test[members[: len(members) // 2]] = True
        styles = range(len(STYLES)) if self.style == "all" else [STYLES.index(self.style)]
        images, targets = [], []
        for style in styles:
            for colour in range(3):
                rng = np.random.default_rng([1, colour, style])  # 1: not the noise of pre-training
                images.append(render(grey, np.full(len(grey), colour), np.full(len(grey), style), rng))
                targets.append(10 * colour + label)
        arrays = Arrays(
            inputs=np.concatenate(images),
            targets=np.concatenate(targets),
            split=np.tile(np.where(is_test, TEST, TRAIN).astype(np.int8), len(images)),
            num_classes=30,
            class_names=[f"{colour} {digit}" for colour in COLOURS for digit in DIGITS],
        )
        if self.style == "all":
            arrays.domain = np.repeat(np.arange(len(STYLES)), 3 * len(label))
            arrays.domain_names = list(STYLES)
        # official_bug: images and labels are mixed up on purpose, as in the papers' released code
        return mispaired(arrays) if self.label_pairing == "official_bug" else arrays.check()


def mispaired(arrays: Arrays) -> Arrays:
    """Return the arrays with two mistakes in the code of pFedMoAP and FedOTP (label_pairing=official_bug).

    Class names are in another order than labels.  A client has the labels of its own samples, but images from the top
    of the list of its style, which all its clients share.

    Args:
        arrays: The arrays, which are changed.
    """
    require(
        arrays.domain is not None,
        "dataset.label_pairing=official_bug needs several natural clients (styles), but dataset.style names one: set "
        "dataset.style=all",
    )
    assert arrays.class_names is not None and arrays.domain is not None
    wrong = np.random.default_rng(0).permutation(arrays.num_classes)  # the order of the names
    arrays.class_names = [arrays.class_names[i] for i in wrong]
    # the last argument: all samples, in the order of the lists
    arrays.fit = images_from_top(arrays.domain, arrays.split, np.arange(len(arrays)))
    return arrays.check()
