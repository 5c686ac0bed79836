"""Samples with labels beside questions about pictures: arrays for task=mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.data.base import Arrays
from fedbench.data.questions._answers import EVERY, Answers
from fedbench.data.questions._questions import Question, arrays_of


@dataclass(frozen=True)
class Labelled:
    """One of n.  image: which of the pictures.  labels: whether each of the list is true.  split: as in `Arrays`.
    silo: which of the silos that have labels."""

    image: int
    text: str
    labels: Sequence[bool]
    split: int
    silo: int


def mixed_of(
    questions: Sequence[Question],
    labelled: Sequence[Labelled],
    pictures: np.ndarray,
    tokens: Callable[[Sequence[str]], np.ndarray],
    silos: tuple[Sequence[str], Sequence[str]],
    source: str,
    rule: Answers = EVERY,
) -> Arrays:
    """Questions and, behind them, samples with labels, all of the same pictures [m, channels, H, W] uint8.

    silos: the names of those that ask, and of those that have labels, whose numbers go on after them.  targets as in
    tasks/mixed.py.  rule: which answers a silo has.  ConfigError where a silo has no question to train on.
    """
    asked = arrays_of(questions, pictures, tokens, silos[0], source, rule)
    answer, closed = asked.targets.T
    num_labels, most = len(labelled[0].labels), max(1, *(sum(one.labels) for one in labelled))
    targets = np.full((len(asked) + len(labelled), 1 + most), -1, np.int64)
    targets[: len(asked), 0], targets[: len(asked), 1] = 1 + closed, answer  # open 1, closed 2
    targets[len(asked) :, 0] = 0
    for row, one in zip(targets[len(asked) :], labelled):
        true = np.flatnonzero(one.labels)
        row[1 : 1 + len(true)] = true
    assert asked.class_mask is not None and asked.domain is not None and asked.shared is not None
    classes = max(asked.num_classes, num_labels)
    mask = np.zeros((len(silos[0]) + len(silos[1]), classes), bool)
    mask[: len(silos[0]), : asked.num_classes] = asked.class_mask
    mask[len(silos[0]) :, :num_labels] = True
    image, silo, split = (np.array([getattr(one, name) for one in labelled]) for name in ("image", "silo", "split"))
    text = np.concatenate([asked.parts()["text"], tokens([one.text for one in labelled])])
    return Arrays(
        {"image": pictures, "text": text},
        targets,
        np.concatenate([asked.split, split.astype(np.int8)]),
        classes,
        task="mixed",
        domain=np.concatenate([asked.domain, silo.astype(np.int64) + len(silos[0])]),
        domain_names=[*silos[0], *silos[1]],
        class_mask=mask,
        mean=asked.mean,
        std=asked.std,
        shared={"image": np.concatenate([asked.shared["image"], image.astype(np.int64)])},
    ).check()
