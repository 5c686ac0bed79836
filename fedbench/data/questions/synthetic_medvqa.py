"""Generated scans with questions about them, of five hospitals: what FedPIA's tasks are, in small and without a file.

A scan is 16 x 16 pixels of noise with, three times out of four, a lesion: an 8 x 8 stamp of vertical or horizontal
stripes or a checkerboard, on the left or right, at the top or bottom, faint or strong, aligned to patches of 8 pixels.
Hospitals invert, brighten, pale, or add noise to their scans.  They ask five things in two or three ways each, of which
the answer needs the scan.  They do not name things alike: a checkerboard is checkered, a chessboard, a mosaic; the
fourth asks closed questions and how strong a lesion is, the fifth asks no closed ones.  Some test lesions are moderate,
which occurs nowhere in training.
kind=reports: scans with up to three lesions and a sentence that names them, of whom a tenth is left out; their textures
and strengths are six labels, the last one for none.
kind=mixed: the first three of five hospitals ask questions, the others have reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from fedbench.core.options import Count, require
from fedbench.core.rng import generator
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._labelled import Labelled, mixed_of
from fedbench.data.questions._questions import Question, arrays_of, by_words, vocabulary

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
TOLD = ("and nothing", *(REPORT.format(s, t) for s in STRENGTH for t in TEXTURES))
LABELS = (*TEXTURES, "faint", "strong", "others")
ASKING = (0, 1, 2)  # sites that ask questions, of five, where the others have reports
SOURCE = "dataset=synthetic_medvqa"
TOKENS = {"vqa": 8, "reports": 24}


class SyntheticMedVQA:
    """inputs image uint8 [n, 1, 16, 16] and text int64 [n, T]; kind=vqa: targets [n, 2] (_questions.py), T = 8;
    reports: multi-hot [n, 6], T = 24; mixed: those of tasks/mixed.py, T = 24.  sites: hospitals, whose styles repeat
    after five.  train, test: questions, or scans, of each; there are two questions of a scan.  seed: of everything."""

    def __init__(
        self,
        kind: Literal["vqa", "reports", "mixed"] = "vqa",
        sites: Count = 5,
        train: Count = 400,
        test: Count = 100,
        seed: int = 0,
    ):
        least = len(ASKING) + 1
        require(
            kind != "mixed" or sites >= least,
            f"dataset.kind=mixed needs dataset.sites >= {least}, of which one has reports, got {sites}",
        )
        self.kind, self.sites, self.train, self.test, self.seed = kind, sites, train, test, seed

    def load(self) -> Arrays:
        """All hospitals, one after the other; of kind=mixed those that ask first."""
        everybody = range(self.sites)
        if self.kind == "vqa":
            pictures, questions = self._questions(everybody)
            tokens = _tokens([text for texts in ASKED.values() for text in texts], TOKENS["vqa"])
            return arrays_of(questions, np.stack(pictures)[:, None], tokens, self._names(everybody), SOURCE)
        if self.kind == "reports":
            return self._only_reports()
        asking = [site for site in everybody if site % 5 in ASKING]
        telling = [site for site in everybody if site % 5 not in ASKING]
        pictures, questions = self._questions(asking)
        more, labelled = self._reports(telling, len(pictures))
        tokens = _tokens([*(text for texts in ASKED.values() for text in texts), *TOLD], TOKENS["reports"])
        silos = self._names(asking), self._names(telling)
        return mixed_of(questions, labelled, np.stack([*pictures, *more])[:, None], tokens, silos, SOURCE)

    def _questions(self, sites: Sequence[int]) -> tuple[list[np.ndarray], list[Question]]:
        """Scans and questions about them, two of each; silos are numbered in the order of sites."""
        pictures, questions = [], []
        for silo, site in enumerate(sites):
            rng = generator(self.seed, "synthetic_medvqa", site)
            for split, count in ((TRAIN, self.train), (TEST, self.test)):
                for i in range(count):
                    if i % 2 == 0:
                        lesion = drawn_lesion(rng, split == TEST)
                        pictures.append(styled(scan([lesion] if lesion else [], rng), site, rng))
                    topic = str(rng.choice(BY_SITE[site % 5]))
                    asked = str(rng.choice(ASKED[topic]))
                    answer = answered(topic, lesion, site)
                    questions.append(Question(len(pictures) - 1, asked, answer, topic in CLOSED, split, silo))
        return pictures, questions

    def _reports(self, sites: Sequence[int], first: int = 0) -> tuple[list[np.ndarray], list[Labelled]]:
        """Scans, numbered from first on, with reports and labels."""
        pictures, labelled = [], []
        for silo, site in enumerate(sites):
            rng = generator(self.seed, "synthetic_medvqa reports", site)
            for split, count in ((TRAIN, self.train), (TEST, self.test)):
                for _ in range(count):
                    places = rng.permutation(4)[: rng.integers(4)]
                    lesions = [(str(rng.choice(TEXTURES)), int(p), str(rng.choice(USUAL))) for p in places]
                    pictures.append(styled(scan(lesions, rng), site, rng))
                    told = [REPORT.format(s, t) for t, _, s in lesions if rng.random() >= 0.1]
                    text = " and ".join(told) or "the scan shows nothing"
                    found = {name for t, _, s in lesions for name in (t, s)} or {"others"}
                    labels = [name in found for name in LABELS]
                    labelled.append(Labelled(first + len(pictures) - 1, text, labels, split, silo))
        return pictures, labelled

    def _only_reports(self) -> Arrays:
        pictures, labelled = self._reports(range(self.sites))
        return Arrays(
            {
                "image": np.stack(pictures)[:, None],
                "text": _tokens(TOLD, TOKENS["reports"])([one.text for one in labelled]),
            },
            np.array([one.labels for one in labelled], np.float32),
            np.array([one.split for one in labelled], np.int8),
            len(LABELS),
            task="multilabel",
            class_names=list(LABELS),
            domain=np.array([one.silo for one in labelled], np.int64),
            domain_names=self._names(range(self.sites)),
        ).check()

    def _names(self, sites: Sequence[int]) -> list[str]:
        return [SITES[i % 5] if i < 5 else f"{SITES[i % 5]}_{i // 5 + 1}" for i in sites]


def _tokens(texts: Sequence[str], length: int) -> Callable[[Sequence[str]], np.ndarray]:
    """From texts to numbers [n, length]; known are the words of these texts."""
    known = vocabulary(texts)
    return lambda some: by_words(some, known, length)


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
