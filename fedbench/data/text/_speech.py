"""Next-character prediction of what speakers say: windows of character indices, split in time.

As in LEAF (Caldas et al., 2018), a sample is the characters of a window and the next one, and windows overlap.  The
first windows of a speaker are trained on and the last ones tested on.  Windows between them, which have characters of
training and test windows, are removed.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbench.core.options import require
from fedbench.data.base import TEST, TRAIN, Arrays

log = logging.getLogger("fedbench.data")

ALPHABET = "".join(sorted(string.ascii_letters + string.digits + "\n !\"&'(),-.:;>?[]}"))  # LEAF's 80 characters
SPACE = ALPHABET.index(" ")
NAMES = {"\n": "newline", " ": "space"}
_INDICES = np.full(128, SPACE)  # index in ALPHABET of each ASCII code
_INDICES[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))


class Windows(NamedTuple):
    """Windows of T characters of one speaker's text with their next characters, in the order of the text.

    Attributes:
        speaker: The name.
        text: Characters [n, T] int64.
        target: The next characters [n] int64.
        split: The part of each window [n] int8.
    """

    speaker: str
    text: np.ndarray
    target: np.ndarray
    split: np.ndarray


def encode(text: str) -> np.ndarray:
    """Return the index in ALPHABET of each character of a text; others count as spaces.  # [len(text)] int64"""
    # Code points of the characters, with which _INDICES is indexed.
    points = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    return _INDICES[np.minimum(points, 127)]  # 127 is not in ALPHABET


def select_windows(count: int, length: int, stride: int, test: float) -> tuple[np.ndarray, np.ndarray]:
    """Select a speaker's training and test windows, so that no character is in windows of both parts.

    The first windows are for training, and the last ones for testing.

    Args:
        count: The number of windows at stride 1.
        length: Characters of a window.
        stride: Characters from one window to the next.
        test: The fraction of test windows.

    Returns:
        The first character of each selected window [n] int64, and its part, TRAIN or TEST [n] int8.
    """
    start = np.arange(0, count, stride)
    num_train = int((1 - test) * count + 1e-9)  # 1e-9: rounding errors must not turn 9 = 0.9 * 10 into 8
    # A window between these limits would share characters with windows of both parts.
    start = start[(start < num_train) | (start >= num_train + length - 1)]
    return start, np.where(start < num_train, TRAIN, TEST).astype(np.int8)


def cut_windows(speaker: str, text: str, length: int, stride: int, test: float) -> Windows:
    """Return the training and test windows of a speaker's text; no windows if it is not longer than one.

    Args:
        speaker: The name of the speaker.
        text: All that the speaker says.
        length: Characters of a window.
        stride: Characters from one window to the next.
        test: The fraction of test windows.
    """
    indices = encode(text)  # of characters in the alphabet
    start, split = select_windows(max(0, len(indices) - length), length, stride, test)
    return Windows(speaker, indices[start[:, None] + np.arange(length)], indices[start + length], split)


def speaker_arrays(speakers: Sequence[Windows], source: str) -> Arrays:
    """Return the data set of all speakers that have training and test windows.  Speakers are the natural clients.

    The accuracies of two baselines are logged: the most frequent character, and the one that most often follows the
    last character.

    Args:
        speakers: The windows of each speaker.
        source: The data set, for messages.

    Raises:
        ConfigError: No speaker remains.
    """
    used = [w for w in speakers if (w.split == TRAIN).any() and (w.split == TEST).any()]
    require(
        bool(used),
        f"{source}: none of {len(speakers):,} speakers has enough text for a training and a test window: lower "
        "dataset.length",
    )
    arrays = Arrays(
        inputs={"text": np.concatenate([w.text for w in used])},
        targets=np.concatenate([w.target for w in used]),
        split=np.concatenate([w.split for w in used]),
        num_classes=len(ALPHABET),
        class_names=[NAMES.get(c, c) for c in ALPHABET],  # NAMES: of line end and space
        domain=np.repeat(np.arange(len(used)), [len(w.target) for w in used]),
        domain_names=[w.speaker for w in used],
    ).check()
    unigram, bigram = baselines(arrays)
    log.info(
        "%s: %s speakers, %s samples; of the test characters, %.1f%% are the most frequent one, and %.1f%% the most "
        "frequent one after the last character of the window",
        source, f"{len(used):,}", f"{len(arrays):,}", 100 * unigram, 100 * bigram,
    )  # fmt: skip
    return arrays


def baselines(arrays: Arrays) -> tuple[float, float]:
    """Return the test accuracies of two simple predictors, which count characters in the training part.

    The first one always predicts the most frequent character.  The second one predicts the character that most often
    follows the last one of the window.

    Args:
        arrays: Windows "text" [n, T] and next characters as targets [n].
    """
    last = arrays.parts()["text"][:, -1]  # [n], the last character of each window
    train, test = arrays.split == TRAIN, arrays.split == TEST  # [n] bool
    pairs = np.zeros((arrays.num_classes, arrays.num_classes), np.int64)  # [C, C], by last and next character
    np.add.at(pairs, (last[train], arrays.targets[train]), 1)
    most_frequent = pairs.sum(0).argmax()
    following = np.where(pairs.any(1), pairs.argmax(1), most_frequent)  # [C]
    target = arrays.targets[test]
    return float((target == most_frequent).mean()), float((target == following[last[test]]).mean())
