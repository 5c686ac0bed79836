"""Questions about pictures, of one or several data sets: a table of them, and the arrays that it becomes.

A silo (a client) has answers of its own: all that occur in its training part, sorted, or fewer (_answers.py).  A test
question whose answer is not among them stays, and counts as answered wrongly; the share of the others is the ceiling of
its accuracy.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.core.options import require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._answers import EVERY, Answers

log = logging.getLogger(__name__)
PAD, CLS, SEP, UNK = 0, 1, 2, 3
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


@dataclass(frozen=True)
class Question:
    """One of n.  image: which of the pictures.  closed: whether it is of a closed type.  split: as in `Arrays`.
    silo: the hospital, organ or data set that it is of."""

    image: int
    question: str
    answer: str
    closed: bool
    split: int
    silo: int


# -- words -----------------------------------------------------------------------------------------------
def words(text: str) -> list[str]:
    """Of small letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """Numbers of the words, in order, behind the special tokens."""
    return {word: i for i, word in enumerate([*SPECIAL, *sorted({w for text in texts for w in words(text)})])}


def by_words(texts: Sequence[str], known: dict[str, int], length: int) -> np.ndarray:
    """[CLS], words and [SEP], cut off and padded to so many tokens.  # [n, length] int64"""
    rows = np.full((len(texts), length), PAD, np.int64)
    for row, text in zip(rows, texts):
        tokens = [CLS, *(known.get(w, UNK) for w in words(text))][: length - 1]
        row[: len(tokens) + 1] = [*tokens, SEP]
    return rows


# -- arrays ----------------------------------------------------------------------------------------------
def answers_of(questions: Sequence[Question], silos: int, rule: Answers = EVERY) -> list[dict[str, int]]:
    """Each silo's answers and their numbers: those of its training questions that the rule keeps, sorted."""
    found: list[list[str]] = [[] for _ in range(silos)]
    for q in questions:
        if q.split == TRAIN:
            found[q.silo].append(q.answer)
    return [{answer: i for i, answer in enumerate(rule.classes(own))} for own in found]


def arrays_of(
    questions: Sequence[Question],
    pictures: np.ndarray,
    tokens: Callable[[Sequence[str]], np.ndarray],
    silos: Sequence[str],
    source: str,
    rule: Answers = EVERY,
) -> Arrays:
    """inputs image (pictures [m, channels, H, W] uint8, each stored once) and text [n, T]; targets [n, 2] int64: the
    answer's number in the silo, -1 outside of it, and whether the question is closed.  rule: which answers a silo has.
    ConfigError where it has nothing to train on."""
    answers = answers_of(questions, len(silos), rule)
    asked = {q.silo for q in questions if q.split == TRAIN}
    empty = [name for silo, name in enumerate(silos) if silo not in asked]
    require(not empty, f"{source}: there are no training questions of {', '.join(empty)}")
    none = [name for name, own in zip(silos, answers) if not own]
    require(
        not none,
        f"{source}: no training answer of {', '.join(none)} occurs dataset.min_count={rule.min_count} times",
    )
    most = max(2, *(len(own) for own in answers))
    targets = np.array([(answers[q.silo].get(q.answer, -1), q.closed) for q in questions], np.int64)
    facts = majority(questions, answers)
    for name, own, (alone, ceiling) in zip(silos, answers, facts):
        log.info(
            "%s, %s: %d answers; %.1f%% of the test questions have the usual answer to their words, %.1f%% one that "
            "occurs in training",
            *(source, name, len(own), 100 * alone, 100 * ceiling),
        )
    return Arrays(
        {"image": pictures, "text": tokens([q.question for q in questions])},
        targets,
        np.array([q.split for q in questions], np.int8),
        most,
        task="vqa",
        domain=np.array([q.silo for q in questions], np.int64),
        domain_names=list(silos),
        class_mask=np.array([[i < len(own) for i in range(most)] for own in answers]),
        mean=(0.5,) * pictures.shape[1],
        std=(0.5,) * pictures.shape[1],
        shared={"image": np.array([q.image for q in questions], np.int64)},
    ).check()


def majority(questions: Sequence[Question], answers: Sequence[dict[str, int]]) -> list[tuple[float, float]]:
    """Of each silo's test questions the share that the most frequent training answer to the same words answers (to no
    such words: the most frequent one at all), and the share whose answer is among the silo's.  NaN without any."""
    by_text: list[dict[str, Counter]] = [{} for _ in answers]
    overall = [Counter() for _ in answers]
    for q in questions:
        if q.split == TRAIN:
            overall[q.silo][q.answer] += 1
            by_text[q.silo].setdefault(" ".join(words(q.question)), Counter())[q.answer] += 1
    shares = []
    for silo, own in enumerate(answers):
        tested = [q for q in questions if q.split == TEST and q.silo == silo]
        hits = [_first(by_text[silo].get(" ".join(words(q.question)), overall[silo])) == q.answer for q in tested]
        known = [q.answer in own for q in tested]
        shares.append((float(np.mean(hits)) if hits else np.nan, float(np.mean(known)) if known else np.nan))
    return shares


def _first(counts: Counter) -> str | None:
    """The most frequent one, of equally frequent ones the first in the alphabet."""
    return min(counts, key=lambda answer: (-counts[answer], answer)) if counts else None
