"""Generated scans of five hospitals with questions about them: a small version of FedPIA's tasks that needs no file.

A scan is 16 x 16 pixels of noise with a lesion in three of four cases.  A lesion is an 8 x 8 stamp of vertical or
horizontal stripes or a checkerboard, on the left or right, at the top or bottom, faint or strong.
Hospitals invert, brighten or pale their scans, or add noise.  They ask five kinds of questions in two or three wordings
each.  The answer always needs the scan.  Hospitals use different words: a checkerboard is checkered, a chessboard or a
mosaic.  The fourth hospital asks closed questions and about strength, and the fifth asks only open questions.  Some
test lesions are moderate, which never occurs in training.
kind=reports: scans with up to three lesions and a sentence that names them; a tenth of the lesions is not named.  Their
textures and strengths are five labels, and the sixth label is for scans without a lesion.
kind=mixed: the first three of five hospitals have questions, the others have reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbench.core.options import Count, require
from fedbench.core.rng import generator
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._labelled import Labelled, mixed_arrays
from fedbench.data.questions._questions import Question, question_arrays, tokenize_words, vocabulary

SIDE, HALF = 16, 8
HOSPITALS = ("inverted", "bright", "noisy", "pale", "plain")
TEXTURES = ("vertical", "horizontal", "checkered")
CHECKERED = ("checkered", "chessboard", "mosaic", "checkered", "checkered")  # word of each hospital
USUAL = ("faint", "strong")  # strengths that occur in training
STRENGTH = {"faint": 0.35, "moderate": 0.5, "strong": 0.7}
WORDINGS = {
    "present": ("is there a lesion", "do you see a lesion", "does this scan show a lesion"),
    "left": ("is the lesion on the left", "does the lesion lie left"),
    "texture": ("what texture is the lesion", "which texture has the lesion", "name the texture"),
    "side": ("which side is the lesion on", "left or right"),
    "strength": ("how strong is the lesion", "how bright is the lesion"),
}
QUESTIONS = [text for texts in WORDINGS.values() for text in texts]
CLOSED = ("present", "left")
TOPICS = (*(tuple(WORDINGS),) * 3, (*CLOSED, "strength"), ("texture", "side", "strength"))  # of each hospital
SENTENCE = "the scan shows {} lesion of {} texture"
REPORTS = ["and nothing", *(SENTENCE.format(s, t) for s in STRENGTH for t in TEXTURES)]  # all words of reports
LABELS = (*TEXTURES, "faint", "strong", "others")
WITH_QUESTIONS = (0, 1, 2)  # hospitals of kind=mixed with questions; the others have reports
SOURCE = "dataset=synthetic_medvqa"
TOKENS = {"vqa": 8, "reports": 24}  # length of a text

Lesion = tuple[str, int, str]  # texture, quadrant (0, 1 on the left, 2, 3 on the right), strength


@dataclass
class SyntheticMedVQA:
    """Generated scans: inputs image uint8 [n, 1, 16, 16] and text int64 [n, T].

    Targets are [n, 2] for vqa (`_questions.py`, T = 8), multi-hot [n, 6] for reports (T = 24), and those of
    `tasks/mixed.py` for mixed (T = 24).

    Args:
        kind: vqa, reports or mixed.
        sites: Number of hospitals; their styles repeat after five.
        train: Training questions (two for each scan), or training scans with reports, of each hospital.
        test: Test questions or scans of each hospital.
        seed: Seed of the generator.
    """

    kind: Literal["vqa", "reports", "mixed"] = "vqa"
    sites: Count = 5
    train: Count = 400
    test: Count = 100
    seed: int = 0

    def __post_init__(self) -> None:
        least = len(WITH_QUESTIONS) + 1
        require(
            self.kind != "mixed" or self.sites >= least,
            f"dataset.sites={self.sites} is too small for dataset.kind=mixed: set it to at least {least}, so that one "
            "hospital has reports",
        )

    def load(self) -> Arrays:
        """Return the generated samples of all hospitals: first those with questions, then those with reports.

        With kind=vqa all hospitals have questions, with kind=reports none, and with kind=mixed three of each five.
        """
        sites = range(self.sites)
        asking = list(sites) if self.kind == "vqa" else []
        if self.kind == "mixed":  # there are five kinds of hospitals
            asking = [site for site in sites if site % 5 in WITH_QUESTIONS]
        report_sites = [site for site in sites if site not in asking]
        silos = [[self._name(site) for site in group] for group in (asking, report_sites)]
        pictures, questions = self._questions(asking)
        pictures_with_reports, labelled = self._reports(report_sites, first=len(pictures))
        scans = np.stack([*pictures, *pictures_with_reports])[:, None]  # [m, 1, 16, 16]
        if self.kind == "vqa":
            # a vocabulary of all possible questions; TOKENS: the length of a text
            return question_arrays(questions, scans, _tokenizer(QUESTIONS, TOKENS["vqa"]), silos[0], SOURCE)
        if self.kind == "mixed":
            tokens = _tokenizer([*QUESTIONS, *REPORTS], TOKENS["reports"])
            return mixed_arrays(questions, labelled, scans, tokens, (silos[0], silos[1]), SOURCE)
        text = _tokenizer(REPORTS, TOKENS["reports"])([sample.text for sample in labelled])
        return Arrays(
            inputs={"image": scans, "text": text},
            targets=np.array([sample.labels for sample in labelled], np.float32),
            split=np.array([sample.split for sample in labelled], np.int8),
            num_classes=len(LABELS),
            task="multilabel",
            class_names=list(LABELS),
            domain=np.array([sample.silo for sample in labelled], np.int64),
            domain_names=silos[1],
        ).check()

    def _name(self, site: int) -> str:
        """Return the name of a hospital: its style, such as "noisy", from the sixth on with a number ("noisy_2")."""
        return HOSPITALS[site % 5] if site < 5 else f"{HOSPITALS[site % 5]}_{site // 5 + 1}"

    def _samples(self) -> Iterator[tuple[int, int]]:
        """Yield (part, index in the part) for each sample of one hospital.

        The part is TRAIN for the first self.train samples, and TEST for the following self.test samples.
        """
        for split, count in ((TRAIN, self.train), (TEST, self.test)):
            for i in range(count):
                yield split, i

    def _questions(self, sites: Sequence[int]) -> tuple[list[np.ndarray], list[Question]]:
        """Return scans [16, 16] of hospitals, and two questions about each scan.

        Args:
            sites: Indices of the hospitals, one for each natural client.
        """
        pictures, questions = [], []
        for silo, site in enumerate(sites):  # silo: the index of the natural client
            rng = generator(self.seed, "synthetic_medvqa", site)
            lesion = None
            for split, i in self._samples():  # (part, number of the sample in it)
                if i % 2 == 0:  # a new scan for every second question
                    lesion = sample_lesion(rng, is_test=split == TEST)
                    pictures.append(apply_style(draw_scan([lesion] if lesion else [], rng), site, rng))
                topic = str(rng.choice(TOPICS[site % 5]))  # TOPICS of the five hospitals, repeated for further ones
                text = str(rng.choice(WORDINGS[topic]))
                answer = answer_of(topic, lesion, site)
                is_closed = topic in CLOSED  # answered by yes or no
                image = len(pictures) - 1
                questions.append(Question(image, text, answer, closed=is_closed, split=split, silo=silo))
        return pictures, questions

    def _reports(self, sites: Sequence[int], first: int) -> tuple[list[np.ndarray], list[Labelled]]:
        """Return scans [16, 16] of hospitals, and a report with labels for each scan.

        Args:
            sites: The hospitals.  Their order is that of the natural clients.
            first: The index of the first scan among all scans of the data set.
        """
        pictures, labelled = [], []
        for silo, site in enumerate(sites):
            rng = generator(self.seed, "synthetic_medvqa reports", site)
            for split, _ in self._samples():
                quadrants = rng.permutation(4)[: rng.integers(4)]  # of up to three lesions
                # texture, quadrant and strength of each; USUAL: faint and strong
                lesions = [(str(rng.choice(TEXTURES)), int(q), str(rng.choice(USUAL))) for q in quadrants]
                pictures.append(apply_style(draw_scan(lesions, rng), site, rng))
                # A tenth of the lesions is not named in the report.
                named = [SENTENCE.format(strength, texture) for texture, _, strength in lesions if rng.random() >= 0.1]
                text = " and ".join(named) or "the scan shows nothing"
                # "others" is the label of a scan without lesions
                properties = {name for texture, _, strength in lesions for name in (texture, strength)} or {"others"}
                labels = [name in properties for name in LABELS]
                labelled.append(Labelled(first + len(pictures) - 1, text, labels, split=split, silo=silo))
        return pictures, labelled


def _tokenizer(texts: Sequence[str], length: int) -> Callable[[Sequence[str]], np.ndarray]:
    """Return a function that turns n texts into token indices [n, length].

    Args:
        texts: Texts whose words are the vocabulary.
        length: Tokens of each text, which is cut or padded.
    """
    index = vocabulary(texts)
    return lambda inputs: tokenize_words(inputs, index, length)


def sample_lesion(rng: np.random.Generator, is_test: bool) -> Lesion | None:
    """Return the random lesion (texture, quadrant, strength) of a scan, or None for a quarter of the scans.

    Args:
        rng: Random numbers.
        is_test: Whether it is a test scan.  A tenth of its lesions is moderate, which never occurs in training.
    """
    # Everything is drawn for every scan, so that test and training scans use equally many random numbers.  USUAL: the
    # strengths faint and strong.
    texture, quadrant, strength = str(rng.choice(TEXTURES)), int(rng.integers(4)), str(rng.choice(USUAL))
    exists, is_moderate = rng.random() < 0.75, rng.random() < 0.1
    return (texture, quadrant, "moderate" if is_test and is_moderate else strength) if exists else None


def draw_scan(lesions: list[Lesion], rng: np.random.Generator) -> np.ndarray:
    """Return a scan [16, 16] of noise with a stamp for each lesion, with values in about [0, 1].

    Args:
        lesions: Texture, quadrant and strength of each lesion.
        rng: Generator of the noise.
    """
    picture = rng.normal(0.3, 0.05, (SIDE, SIDE))
    y, x = np.mgrid[:HALF, :HALF]
    # Stripes and squares are 2 pixels wide, with the values 0 and 1.
    stamps = {"vertical": x // 2 % 2, "horizontal": y // 2 % 2, "checkered": (x // 2 + y // 2) % 2}
    for texture, quadrant, strength in lesions:
        column, row = divmod(quadrant, 2)  # quadrants 0 and 1 are on the left, 0 and 2 at the top
        corner = picture[row * HALF : (row + 1) * HALF, column * HALF : (column + 1) * HALF]
        corner += STRENGTH[strength] * stamps[texture]
    return picture


def apply_style(picture: np.ndarray, site: int, rng: np.random.Generator) -> np.ndarray:
    """Return a scan in the style of a hospital.

    Args:
        picture: The scan, [16, 16] in about [0, 1].
        site: The index of the hospital.
        rng: Generator of the noise.

    Returns:
        The scan, [16, 16] uint8.
    """
    style = HOSPITALS[site % 5]  # the five styles repeat; the fifth one is unchanged
    if style == "inverted":
        picture = 1 - picture
    elif style == "bright":
        picture = picture + 0.15
    elif style == "noisy":
        picture = picture + rng.normal(0, 0.05, picture.shape)
    elif style == "pale":
        picture = 0.3 + 0.7 * (picture - 0.3)  # less contrast around the mean of the noise
    return np.round(255 * picture.clip(0, 1)).astype(np.uint8)


def answer_of(topic: str, lesion: Lesion | None, site: int) -> str:
    """Return the answer to a question in the words of a hospital.

    Args:
        topic: The kind of question, a key of WORDINGS.
        lesion: The lesion of the scan, or None.
        site: The index of the hospital.

    Returns:
        "yes" or "no" for a closed question.  For an open one, the lesion's property, or "none" without a lesion.
    """
    if topic in CLOSED:
        is_true = lesion is not None and (topic == "present" or lesion[1] < 2)  # quadrants 0 and 1 are on the left
        return "yes" if is_true else "no"
    if lesion is None:
        return "none"
    texture, quadrant, strength = lesion
    if topic == "texture":
        return CHECKERED[site % 5] if texture == "checkered" else texture  # some hospitals have a word of their own
    if topic == "side":
        return "left" if quadrant < 2 else "right"
    return strength
