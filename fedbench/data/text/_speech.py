"""Next-character prediction of what speakers say: from their words to windows of numbers, cut in time.

As LEAF has it (Caldas et al., 2018): a sample is the characters of a window and the one that follows, windows overlap,
a speaker's first ones are trained on and its last ones tested on, and those between, whose characters are in both, are
left out.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays

log = logging.getLogger("fedbench.data")

ALPHABET = "".join(sorted(string.ascii_letters + string.digits + "\n !\"&'(),-.:;>?[]}"))  # LEAF's 80 characters
SPACE = ALPHABET.index(" ")
NAMES = {"\n": "newline", " ": "space"}
_NUMBERS = np.full(128, SPACE)
_NUMBERS[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))


class Windows(NamedTuple):
    """Of one speaker, in the order of the text.  text: int64 [n, T], target: int64 [n], split: int8 [n]."""

    speaker: str
    text: np.ndarray
    target: np.ndarray
    split: np.ndarray


def encoded(text: str) -> np.ndarray:
    """The number of each character in ALPHABET; of any other, that of a space.  # [len(text)] int64"""
    points = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    return _NUMBERS[np.minimum(points, 127)]


def cut(count: int, length: int, stride: int, test: float) -> tuple[np.ndarray, np.ndarray]:
    """Which of a speaker's windows are used, every stride-th of count, and their parts.  # [n] int64, [n] int8"""
    start = np.arange(0, count, stride)
    trained = int((1 - test) * count + 1e-9)  # as partition/base.py: 0.9 * 10 is below 9
    used = (start < trained) | (start >= trained + length - 1)
    start = start[used]
    return start, np.where(start < trained, TRAIN, TEST).astype(np.int8)


def windows(speaker: str, text: str, length: int, stride: int, test: float) -> Windows:
    """Of one speaker's words; none where they are no longer than a window."""
    numbers = encoded(text)
    start, split = cut(max(0, len(numbers) - length), length, stride, test)
    return Windows(speaker, numbers[start[:, None] + np.arange(length)], numbers[start + length], split)


def arrays_of(speakers: Sequence[Windows], source: str) -> Arrays:
    """Each a natural silo; those with nothing to train or to test on are left out.  source: for the sentences.

    ConfigError where nobody is left.  What counting characters would reach is logged.
    """
    kept = [w for w in speakers if (w.split == TRAIN).any() and (w.split == TEST).any()]
    if not kept:
        raise ConfigError(
            f"{source}: none of {len(speakers):,} speakers says enough to be trained and tested on, "
            "with windows of dataset.length characters"
        )
    arrays = Arrays(
        {"text": np.concatenate([w.text for w in kept])},
        np.concatenate([w.target for w in kept]),
        np.concatenate([w.split for w in kept]),
        len(ALPHABET),
        class_names=[NAMES.get(c, c) for c in ALPHABET],
        domain=np.repeat(np.arange(len(kept)), [len(w.target) for w in kept]),
        domain_names=[w.speaker for w in kept],
    ).check()
    frequent, bigram = counted(arrays)
    log.info(
        "%s: %s speakers, %s samples; of the test characters %.1f%% are the most frequent one, and %.1f%% the most "
        "frequent one behind the last that is shown", source, f"{len(kept):,}", f"{len(arrays):,}", 100 * frequent,
        100 * bigram,
    )  # fmt: skip
    return arrays


def counted(arrays: Arrays) -> tuple[float, float]:
    """Shares of test targets that are the most frequent one of the training part, and the most frequent one behind the
    last character that is shown: what a model has to be better than."""
    last, train, test = arrays.parts()["text"][:, -1], arrays.split == TRAIN, arrays.split == TEST
    pairs = np.zeros((arrays.num_classes, arrays.num_classes), np.int64)
    np.add.at(pairs, (last[train], arrays.targets[train]), 1)
    frequent = pairs.sum(0).argmax()
    following = np.where(pairs.any(1), pairs.argmax(1), frequent)  # [C]
    target = arrays.targets[test]
    return float((target == frequent).mean()), float((target == following[last[test]]).mean())
