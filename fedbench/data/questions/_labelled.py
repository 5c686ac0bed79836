"""Arrays of questions and of samples with labels about the same pictures, for task=mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.data.base import Arrays
from fedbench.data.questions._answers import ALL_ANSWERS, AnswerRule
from fedbench.data.questions._questions import Question, question_arrays


@dataclass(frozen=True)
class Labelled:
    """One sample with labels, such as a radiograph and its report.

    Attributes:
        image: The index of its picture.
        text: The text.
        labels: Whether each label is true.
        split: The published part: TRAIN, VAL or TEST.
        silo: The index of its natural client, among those with labels.
    """

    image: int
    text: str
    labels: Sequence[bool]
    split: int
    silo: int


def mixed_arrays(
    questions: Sequence[Question],
    labelled: Sequence[Labelled],
    pictures: np.ndarray,
    tokens: Callable[[Sequence[str]], np.ndarray],
    silos: tuple[Sequence[str], Sequence[str]],
    source: str,
    rule: AnswerRule = ALL_ANSWERS,
) -> Arrays:
    """Return the arrays of questions, followed by samples with labels.

    Args:
        questions: The questions.
        labelled: The samples with labels.
        pictures: All pictures [m, channels, H, W] uint8.
        tokens: Function from n texts to token indices [n, T].
        silos: The names of the natural clients with questions, and of those with labels, which come after them.
        source: The data set, for messages.
        rule: The rule of which answers are classes.

    Raises:
        ConfigError: A natural client has no training question.
    """
    arrays = question_arrays(questions, pictures, tokens, silos[0], source, rule)
    assert arrays.class_mask is not None and arrays.domain is not None and arrays.shared is not None
    num_labels = len(labelled[0].labels)
    num_asking = len(silos[0])  # clients with questions
    num_columns = 1 + max(1, *(sum(sample.labels) for sample in labelled))  # kind of sample, then answer or true labels
    answer, closed = arrays.targets.T
    targets = np.full((len(arrays) + len(labelled), num_columns), -1, np.int64)
    targets[: len(arrays), 0] = 1 + closed  # open 1, closed 2
    targets[: len(arrays), 1] = answer
    targets[len(arrays) :, 0] = 0  # labels
    for row, sample in zip(targets[len(arrays) :], labelled):
        true = np.flatnonzero(sample.labels)
        row[1 : 1 + len(true)] = true
    num_classes = max(arrays.num_classes, num_labels)
    mask = np.zeros((num_asking + len(silos[1]), num_classes), bool)
    mask[:num_asking, : arrays.num_classes] = arrays.class_mask
    mask[num_asking:, :num_labels] = True
    split = np.array([sample.split for sample in labelled], np.int8)
    domain = num_asking + np.array([sample.silo for sample in labelled], np.int64)
    image = np.array([sample.image for sample in labelled], np.int64)
    return Arrays(
        inputs={
            "image": pictures,
            "text": np.concatenate([arrays.parts()["text"], tokens([sample.text for sample in labelled])]),
        },
        targets=targets,
        split=np.concatenate([arrays.split, split]),
        num_classes=num_classes,
        task="mixed",
        domain=np.concatenate([arrays.domain, domain]),
        domain_names=[*silos[0], *silos[1]],
        class_mask=mask,
        mean=arrays.mean,
        std=arrays.std,
        shared={"image": np.concatenate([arrays.shared["image"], image])},
    ).check()
