"""Questions about pictures of one or several data sets, and the arrays that they become.

The classes of a natural client are the answers in its training part, sorted, or a selection of them (`_answers.py`).
A test question with another answer remains and counts as answered wrongly.  The fraction of the others is the highest
possible accuracy.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.core.options import require
from fedbench.data._images import half_per_channel
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._answers import ALL_ANSWERS, AnswerRule

log = logging.getLogger(__name__)
PAD, CLS, SEP, UNK = 0, 1, 2, 3
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


@dataclass(frozen=True)
class Question:
    """One question about a picture, with its normalized answer, its part and its natural client.

    Attributes:
        image: The index of its picture.
        question: The text.
        answer: The normalized answer.
        closed: Whether it is of a closed type.
        split: The published part: TRAIN, VAL or TEST.
        silo: The index of its natural client (a hospital, organ or data set).
    """

    image: int
    question: str
    answer: str
    closed: bool
    split: int
    silo: int


# -- words -----------------------------------------------------------------------------------------------
def split_words(text: str) -> list[str]:
    """Return the words of a text in order and in lower case.  A word is a sequence of letters a to z and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """Return a dict from token to index: [PAD], [CLS], [SEP], [UNK] are 0 to 3; then the sorted words of the texts."""
    words = sorted({word for text in texts for word in split_words(text)})
    return {word: i for i, word in enumerate([*SPECIAL, *words])}


def tokenize_words(texts: Sequence[str], index: dict[str, int], length: int) -> np.ndarray:
    """Return token indices of texts: [CLS], words and [SEP], cut or padded to a length.

    Args:
        texts: n texts.
        index: The index of each word of the vocabulary.  Other words become [UNK].
        length: Tokens of each text.

    Returns:
        Indices, [n, length] int64.
    """
    rows = np.full((len(texts), length), PAD, np.int64)
    for row, text in zip(rows, texts):
        tokens = [CLS, *(index.get(word, UNK) for word in split_words(text))][: length - 1]
        row[: len(tokens) + 1] = [*tokens, SEP]
    return rows


# -- arrays ----------------------------------------------------------------------------------------------
def answer_indices(
    questions: Sequence[Question], num_silos: int, rule: AnswerRule = ALL_ANSWERS
) -> list[dict[str, int]]:
    """Return the classes of each natural client, by the answers in its training part.

    Args:
        questions: All questions.
        num_silos: The number of natural clients.
        rule: The rule of which answers are classes.  By default, all answers in the training part are.

    Returns:
        For each natural client, a dict from answer to the index of its class; other answers are not in it.
    """
    training_answers: list[list[str]] = [[] for _ in range(num_silos)]
    for question in questions:
        if question.split == TRAIN:
            training_answers[question.silo].append(question.answer)
    return [{answer: i for i, answer in enumerate(rule.classes(answers))} for answers in training_answers]


def question_arrays(
    questions: Sequence[Question],
    pictures: np.ndarray,
    tokens: Callable[[Sequence[str]], np.ndarray],
    silos: Sequence[str],
    source: str,
    rule: AnswerRule = ALL_ANSWERS,
) -> Arrays:
    """Return the arrays of questions: inputs image and text [n, T], targets [n, 2] int64.

    Targets are the class of the answer in its natural client, -1 if it is not a class, and whether the question is
    closed.

    Args:
        questions: n questions.
        pictures: [m, channels, H, W] uint8, each stored once.
        tokens: Function from n texts to token indices [n, T].
        silos: The names of the natural clients, in the order of their indices.
        source: The data set, for messages.
        rule: The rule of which answers are classes.

    Raises:
        ConfigError: A natural client has no training question or no classes.
    """
    answers = answer_indices(questions, len(silos), rule)
    trained = {question.silo for question in questions if question.split == TRAIN}
    empty = [name for silo, name in enumerate(silos) if silo not in trained]
    require(
        not empty,
        f"{source}: there are no training questions of {', '.join(empty)}: add some to the files, or remove these "
        "names from dataset.sets or dataset.clients",
    )
    without_classes = [name for name, index in zip(silos, answers) if not index]
    require(
        not without_classes,
        f"{source}: no training answer of {', '.join(without_classes)} occurs "
        f"dataset.min_count={rule.min_count} times: lower dataset.min_count",
    )
    num_classes = max(2, *(len(index) for index in answers))  # length of the longest list of answers
    for name, index, (majority, ceiling) in zip(silos, answers, baselines(questions, answers)):
        log.info(
            "%s, %s: %d answers; %.1f%% of the test questions are answered by the most frequent training answer to the "
            "same words, and %.1f%% have an answer that occurs in training",
            *(source, name, len(index), 100 * majority, 100 * ceiling),
        )
    return Arrays(
        inputs={"image": pictures, "text": tokens([question.question for question in questions])},
        targets=np.array([(answers[q.silo].get(q.answer, -1), q.closed) for q in questions], np.int64),
        split=np.array([question.split for question in questions], np.int8),
        num_classes=num_classes,
        task="vqa",
        domain=np.array([question.silo for question in questions], np.int64),
        domain_names=list(silos),
        class_mask=np.array([np.arange(num_classes) < len(index) for index in answers]),
        mean=half_per_channel(pictures),
        std=half_per_channel(pictures),
        shared={"image": np.array([question.image for question in questions], np.int64)},
    ).check()


def baselines(questions: Sequence[Question], answers: Sequence[dict[str, int]]) -> list[tuple[float, float]]:
    """Return the accuracy of a majority vote and the highest possible accuracy, for each natural client.

    The majority vote answers with the most frequent training answer to a question of the same words, or else to any
    question.

    Args:
        questions: All questions.
        answers: For each natural client, a dict from answer to the index of its class.

    Returns:
        For each natural client, two fractions of its test questions: those that the majority vote answers correctly,
        and those whose answer is a class.  Both are NaN if it has no test questions.
    """
    by_text: list[dict[str, Counter]] = [{} for _ in answers]
    overall = [Counter() for _ in answers]
    for q in questions:
        if q.split == TRAIN:
            overall[q.silo][q.answer] += 1
            by_text[q.silo].setdefault(" ".join(split_words(q.question)), Counter())[q.answer] += 1
    fractions = []
    for silo, index in enumerate(answers):
        hits, covered = [], []
        for q in questions:
            if q.split == TEST and q.silo == silo:
                counts = by_text[silo].get(" ".join(split_words(q.question)), overall[silo])
                hits.append(_most_frequent(counts) == q.answer)
                covered.append(q.answer in index)
        fractions.append((float(np.mean(hits)), float(np.mean(covered))) if hits else (np.nan, np.nan))
    return fractions


def _most_frequent(counts: Counter) -> str | None:
    """Return the answer with the largest count, the alphabetically first of several; None if there are no answers."""
    return min(counts, key=lambda answer: (-counts[answer], answer)) if counts else None
