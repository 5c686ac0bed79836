"""Generated scans with questions about them, of five hospitals: what FedPIA's tasks are, in small and without a file.

A scan is 16 x 16 pixels of noise with, three times out of four, a lesion: an 8 x 8 stamp of vertical or horizontal
stripes or a checkerboard, on the left or right, at the top or bottom, faint or strong, aligned to patches of 8 pixels.
Hospitals invert, brighten, pale, or add noise to their scans.  They ask five things in two or three ways each, of which
the answer needs the scan.  They do not name things alike: a checkerboard is checkered, a chessboard, a mosaic; the
fourth asks closed questions and how strong a lesion is, the fifth asks no closed ones.  Some test lesions are moderate,
which occurs nowhere in training.
kind=reports: scans with up to three lesions and a sentence that names them, of whom a tenth is left out; their textures
and strengths are six labels, the last one for none.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbench.core.options import Count
from fedbench.core.rng import generator
from fedbench.data._questions import Question, arrays_of, by_words, vocabulary
from fedbench.data.base import TEST, TRAIN, Arrays

SIDE, HALF = 16, 8
SITES = ("inverted", "bright", "noisy", "pale", "plain")
TEXTURES = ("vertical", "horizontal", "checkered")
NAMES = ("checkered", "chessboard", "mosaic", "checkered", "checkered")  # of the third, by site
USUAL = ("faint", "strong")
STRENGTH = {"faint": 0.35, "moderate": 0.5, "strong": 0.7}
ASKED = {
    "present": ("is there a lesion", "do you see a lesion", "does this scan show a lesion"),
    "left": ("is the lesion on the left", "does the lesion lie left"),
    "texture": ("what texture is the lesion", "which texture has the lesion", "name the texture"),
    "side": ("which side is the lesion on", "left or right"),
    "strength": ("how strong is the lesion", "how bright is the lesion"),
}
CLOSED = ("present", "left")
BY_SITE = (*(tuple(ASKED),) * 3, (*CLOSED, "strength"), ("texture", "side", "strength"))
REPORT = "the scan shows {} lesion of {} texture"
LABELS = (*TEXTURES, "faint", "strong", "others")
TOKENS = {"vqa": 8, "reports": 24}


class SyntheticMedVQA:
    """inputs image uint8 [n, 1, 16, 16] and text int64 [n, T]; kind=vqa: targets [n, 2] (data/_questions.py), T = 8;
    reports: multi-hot [n, 6], T = 24.  sites: hospitals, whose styles repeat after five.  train, test: questions, or
    scans, of each; there are two questions of a scan.  seed: of everything."""

    def __init__(
        self,
        kind: Literal["vqa", "reports"] = "vqa",
        sites: Count = 5,
        train: Count = 400,
        test: Count = 100,
        seed: int = 0,
    ):
        self.kind, self.sites, self.train, self.test, self.seed = kind, sites, train, test, seed

    def load(self) -> Arrays:
        """All hospitals, one after the other."""
        return self._questions() if self.kind == "vqa" else self._reports()

    def _questions(self) -> Arrays:
        pictures, questions = [], []
        for site in range(self.sites):
            rng = generator(self.seed, "synthetic_medvqa", site)
            for split, count in ((TRAIN, self.train), (TEST, self.test)):
                for i in range(count):
                    if i % 2 == 0:
                        lesion = drawn_lesion(rng, split == TEST)
                        pictures.append(styled(scan([lesion] if lesion else [], rng), site, rng))
                    topic = str(rng.choice(BY_SITE[site % 5]))
                    asked = str(rng.choice(ASKED[topic]))
                    answer = answered(topic, lesion, site)
                    questions.append(Question(len(pictures) - 1, asked, answer, topic in CLOSED, split, site))
        known = vocabulary([text for texts in ASKED.values() for text in texts])
        return arrays_of(
            questions,
            np.stack(pictures)[:, None],
            lambda texts: by_words(texts, known, TOKENS["vqa"]),
            self._names(),
            "dataset=synthetic_medvqa",
        )

    def _reports(self) -> Arrays:
        pictures, texts, labels, splits, silos = [], [], [], [], []
        for site in range(self.sites):
            rng = generator(self.seed, "synthetic_medvqa reports", site)
            for split, count in ((TRAIN, self.train), (TEST, self.test)):
                for _ in range(count):
                    places = rng.permutation(4)[: rng.integers(4)]
                    lesions = [(str(rng.choice(TEXTURES)), int(p), str(rng.choice(USUAL))) for p in places]
                    pictures.append(styled(scan(lesions, rng), site, rng))
                    told = [REPORT.format(s, t) for t, _, s in lesions if rng.random() >= 0.1]
                    texts.append(" and ".join(told) or "the scan shows nothing")
                    found = {name for t, _, s in lesions for name in (t, s)} or {"others"}
                    labels.append([name in found for name in LABELS])
                    splits.append(split)
                    silos.append(site)
        known = vocabulary(["and nothing", *(REPORT.format(s, t) for s in STRENGTH for t in TEXTURES)])
        return Arrays(
            {"image": np.stack(pictures)[:, None], "text": by_words(texts, known, TOKENS["reports"])},
            np.array(labels, np.float32),
            np.array(splits, np.int8),
            len(LABELS),
            task="multilabel",
            class_names=list(LABELS),
            domain=np.array(silos, np.int64),
            domain_names=self._names(),
        ).check()

    def _names(self) -> list[str]:
        return [SITES[i % 5] if i < 5 else f"{SITES[i % 5]}_{i // 5 + 1}" for i in range(self.sites)]


Lesion = tuple[str, int, str]  # texture, place (0, 1 on the left, 2, 3 on the right), strength


def drawn_lesion(rng: np.random.Generator, tested: bool) -> Lesion | None:
    """One in three scans of four; of those that are tested some are moderate."""
    texture, place, strong = str(rng.choice(TEXTURES)), int(rng.integers(4)), str(rng.choice(USUAL))
    there, moderate = rng.random() < 0.75, rng.random() < 0.1
    return (texture, place, "moderate" if tested and moderate else strong) if there else None


def scan(lesions: list[Lesion], rng: np.random.Generator) -> np.ndarray:
    """Noise and the stamps.  # [16, 16], in [0, 1] or little outside"""
    picture = rng.normal(0.3, 0.05, (SIDE, SIDE))
    y, x = np.mgrid[:HALF, :HALF]
    stamps = {"vertical": x // 2 % 2, "horizontal": y // 2 % 2, "checkered": (x // 2 + y // 2) % 2}
    for texture, place, strength in lesions:
        column, row = divmod(place, 2)
        corner = picture[row * HALF : (row + 1) * HALF, column * HALF : (column + 1) * HALF]
        corner += STRENGTH[strength] * stamps[texture]
    return picture


def styled(picture: np.ndarray, site: int, rng: np.random.Generator) -> np.ndarray:
    """As the hospital's scanner shows it.  # [16, 16] uint8"""
    style = SITES[site % 5]
    if style == "inverted":
        picture = 1 - picture
    elif style == "bright":
        picture = picture + 0.15
    elif style == "noisy":
        picture = picture + rng.normal(0, 0.05, picture.shape)
    elif style == "pale":
        picture = 0.3 + 0.7 * (picture - 0.3)
    return np.round(255 * picture.clip(0, 1)).astype(np.uint8)


def answered(topic: str, lesion: Lesion | None, site: int) -> str:
    """The answer of a hospital; to what is not there: no, or none."""
    if topic in CLOSED:
        there = lesion is not None and (topic == "present" or lesion[1] < 2)
        return "yes" if there else "no"
    if lesion is None:
        return "none"
    texture, place, strength = lesion
    if topic == "texture":
        return NAMES[site % 5] if texture == "checkered" else texture
    return ("left" if place < 2 else "right") if topic == "side" else strength
