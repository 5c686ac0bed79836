"""Read published questions about pictures from a folder or a zip, and convert them to arrays.

A reader of a data set returns rows.  The further steps (answers of each client, pictures, tokens) are common.
"""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, require
from fedbench.data._files import cached_array, fingerprint, is_hidden, require_unpackable, visible_files
from fedbench.data._images import READER, decode, fill, window_of
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.questions._answers import AnswerRule, Normalizer, Selection, is_closed
from fedbench.data.questions._questions import Question, question_arrays, tokenize_words, vocabulary

log = logging.getLogger("fedbench.data")
MAX_IN_MEMORY = 64 << 20  # bytes of decoded pictures; more are stored on disk
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".gif")


class Files:
    """The files of a folder or zip, found by the last parts of their paths.  key: "dataset.path=...", for messages.

    Such an ending of a path, for example "imgs/1.jpg", finds a file in any folder.

    Args:
        path: The folder or zip.
        name: Name of the data set, for messages.
        where: Where the data set is available, for messages.
    """

    def __init__(self, path: Path, name: str, where: str):
        require(
            path.exists(),
            f"dataset.path={path}: this folder or zip of {name} does not exist; download it from {where}, or set "
            "the path to it",
        )
        self.path = path
        self.name = name
        self.key = f"dataset.path={path}"
        try:
            self.zip = zipfile.ZipFile(path) if path.is_file() else None
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{self.key} is neither a folder nor a zip ({error}): set it to the folder or the zip of {name}"
            ) from error

    @cached_property
    def names(self) -> list[str]:
        """The sorted paths of all files that are not hidden, relative to the folder or to the root of the zip."""
        if self.zip is None:
            return sorted(file.relative_to(self.path).as_posix() for file in visible_files(self.path))
        names = [name for name in self.zip.namelist() if not name.endswith("/")]
        return sorted(name for name in names if not any(map(is_hidden, name.split("/"))))

    @cached_property
    def _name_by_ending(self) -> dict[str, str]:
        """The path (of `names`) for each ending of a path, such as "imgs/1.jpg".

        Of several files with this ending, it is the one in the fewest folders, then the alphabetically first.
        """
        endings: dict[str, str] = {}
        for name in sorted(self.names, key=lambda name: (name.count("/"), name)):
            parts = name.split("/")
            for i in range(len(parts)):
                endings.setdefault("/".join(parts[i:]), name)
        return endings

    def has(self, *endings: str) -> bool:
        """Return whether every one of these path endings, such as "imgs/1.jpg", has a file."""
        return all(ending in self._name_by_ending for ending in endings)

    def find(self, *endings: str) -> str:
        """Return the relative path of a file: for the first of these path endings that has one.

        Raises:
            ConfigError: None of the endings has a file.
        """
        for ending in endings:
            if ending in self._name_by_ending:
                return self._name_by_ending[ending]
        raise ConfigError(
            f"{self.key}: {' or '.join(endings)} of {self.name} does not exist: copy it there from the published data"
        )

    def open(self, name: str) -> Path | io.BytesIO:
        """Return a file as an object that Pillow opens: its path, or its bytes if it is in a zip.

        Args:
            name: The relative path of the file.

        Raises:
            ConfigError: The file looks like a decompression bomb.
        """
        if self.zip is None:  # the files are in a folder
            return self.path / name
        require_unpackable(self.zip.getinfo(name), f"{self.key}: {name}")
        return io.BytesIO(self.zip.read(name))

    def text(self, *endings: str) -> str:
        """Return the content of a text file in UTF-8.

        Args:
            endings: Path endings of the file; the first one that has a file is used.

        Raises:
            ConfigError: None of the endings has a file, or the file cannot be read.
        """
        name = self.find(*endings)
        try:
            file = self.open(name)
            content = file.read_bytes() if isinstance(file, Path) else file.read()
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{self.key}: {name} cannot be read ({error}): replace it by the published file"
            ) from error
        return content.decode("utf-8-sig", errors="replace")

    def json(self, *endings: str) -> list[dict[str, Any]]:
        """Return the list of dicts in a JSON file.

        Args:
            endings: Path endings of the file; the first one that has a file is used.

        Raises:
            ConfigError: The file does not exist, is not JSON, or does not contain a list of dicts.
        """
        try:
            rows = json.loads(self.text(*endings))
        except ValueError as error:
            raise ConfigError(
                f"{self.key}: {self.find(*endings)} cannot be read ({error}): replace it by the published file"
            ) from error
        is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        require(
            is_list,
            f"{self.key}: {self.find(*endings)} must contain a JSON list of questions, each a dict: replace it by the "
            "published file",
        )
        return rows

    def value(self, row: dict[str, Any], *keys: str) -> str:
        """Return the value of a question's dict as text: for the first of these keys that it has.

        Raises:
            ConfigError: It has none of the keys.
        """
        for key in keys:
            if row.get(key) is not None:
                return str(row[key]).strip()
        raise ConfigError(
            f"{self.key}: a question of {self.name} has no {' or '.join(keys)}: {str(row)[:80]}; use the published "
            "files"
        )

    def fingerprint(self, names: Sequence[str]) -> object:
        """Return a cache key for these files that changes when one of them, or the zip that contains them, changes."""
        return fingerprint(self.path) if self.zip is not None else [fingerprint(self.path / name) for name in names]


@dataclass(frozen=True)
class Row:
    """One question about a picture, as published: picture, question, answers, type, part and natural client.

    Attributes:
        image: The name of the picture in its Files.
        question: The text.
        answers: The correct answers, as published.  Only test questions may have several.
        answer_type: open or closed; None if the data set has no types.
        split: The published part: TRAIN, VAL or TEST.
        source: The natural client.
    """

    image: str
    question: str
    answers: tuple[str, ...]
    answer_type: str | None
    split: int
    source: str


@dataclass(kw_only=True)
class PictureTextOptions:
    """Common options of data sets with pictures and texts.  tokens: length of a text; side: of a picture, in pixels.

    Args:
        side: Side of the pictures in pixels.
        color: rgb or grey.
        tokens: Length of a text in tokens, with start and end.
        vocab: The vocab.txt of a WordPiece tokenizer, or its folder.  None: tokens are the words of the training texts.
        data_dir: Folder of the cache, and of data sets without a path.
    """

    side: Count = 64
    color: Literal["rgb", "grey"] = "rgb"
    tokens: Count = 24
    vocab: str | None = None
    data_dir: str = "data"

    def tokenizer(self, training: Sequence[str]) -> Callable[[Sequence[str]], np.ndarray]:
        """Return a function from n texts to token indices [n, tokens] int64.

        Args:
            training: The training texts, whose words are the vocabulary if `vocab` is None.
        """
        if self.vocab is None:
            index = vocabulary(training)
            return lambda texts: tokenize_words(texts, index, self.tokens)
        from fedbench.data.text._wordpiece import tokenize

        path = Path(self.vocab)
        path = path / "vocab.txt" if path.is_dir() else path
        return lambda texts: tokenize(texts, path, self.tokens)

    def pictures(self, picture_names: Sequence[tuple[Files, Sequence[str]]], name: str) -> np.ndarray:
        """Return the pictures of several data sets, one set after the other.

        If they need more than MAX_IN_MEMORY bytes, they are decoded once and mapped from a file in the cache.

        Args:
            picture_names: For each data set, its files and the names of its pictures.
            name: Name of all data sets together, for messages and for the file in the cache.

        Returns:
            All m pictures, [m, channels, side, side] uint8.
        """
        count = sum(len(names) for _, names in picture_names)
        shape = (count, 3 if self.color == "rgb" else 1, self.side, self.side)

        def decode_all() -> Iterator[np.ndarray]:
            log.info("%s: decoding %s pictures", name, f"{count:,}")
            for files, names in picture_names:
                # the values of black and white in pictures of more than 8 bits, from the range of the data set
                window = window_of(names, window=None, name=f"{name} ({files.path})", opened=files.open)
                yield from decode(names, self.side, self.color, window, files.open)

        if np.prod(shape) < MAX_IN_MEMORY:
            return fill(decode_all(), count, shape[1:])
        stamps = [(str(files.path), names, files.fingerprint(names)) for files, names in picture_names]
        key = (stamps, self.side, self.color, READER)  # READER: the version of the code that decodes
        return cached_array(self.data_dir, name, key, shape, decode_all)


@dataclass(kw_only=True)
class QuestionOptions(PictureTextOptions):
    """Common options of data sets with questions about pictures.

    Args:
        min_count: The smallest number of training occurrences that makes an answer a class (see `AnswerRule`).
        answers: Which answers are classes: all or top100_drop (see `AnswerRule.selection`).
        normalizer: How answers are compared: plain or vqa (see `AnswerRule`).
    """

    min_count: Count = 1
    answers: Selection = "all"
    normalizer: Normalizer = "plain"

    @property
    def rule(self) -> AnswerRule:
        """The AnswerRule of the options min_count, answers and normalizer: it decides which answers are classes."""
        return AnswerRule(self.min_count, self.answers, self.normalizer)


Rows = Sequence[tuple[Files, Sequence[Row]]]  # for each data set, its files and its questions
PictureNames = list[tuple[Files, Sequence[str]]]  # for each data set, its files and the names of its pictures


def rows_to_arrays(rows: Rows, silos: Sequence[str], options: QuestionOptions, source: str) -> Arrays:
    """Return the arrays of questions, one data set after the other.

    The vocabulary is that of the training questions, unless the options name a file.

    Args:
        rows: The files and the questions of each data set.
        silos: The names of the natural clients in order; `Row.source` of each question is one of them.
        options: The options of the data set.  Its `rule` selects the answers that are classes.
        source: The data set, for messages, as in "dataset=vqa_rad".
    """
    # picture_names: for each data set, its files and the names of its pictures
    questions, picture_names = rows_to_questions(rows, silos, source, options.rule)
    tokens = options.tokenizer([question.question for question in questions if question.split == TRAIN])
    pictures = options.pictures(picture_names, source.removeprefix("dataset="))
    return question_arrays(questions, pictures, tokens, silos, source, options.rule)


def rows_to_questions(
    rows: Rows, silos: Sequence[str], source: str, rule: AnswerRule
) -> tuple[list[Question], PictureNames]:
    """Return the questions that the rule keeps, and the names of the pictures of each data set.

    If a question has several correct answers, the first one that is a class of its client is used.

    Args:
        rows: The files and the questions of each data set.
        silos: The names of the natural clients in order; `Row.source` of each question is one of them.
        source: The data set, for messages.
        rule: The rule of which answers are classes.

    Returns:
        The questions, whose pictures are numbered in the order of all data sets.  And for each data set, its files and
        the sorted names of its pictures.

    Raises:
        ConfigError: There are no questions.
    """
    silo_index = {silo: i for i, silo in enumerate(silos)}
    training_answers: list[list[str]] = [[] for _ in silos]
    for _, rows_of_set in rows:
        for row in rows_of_set:
            if row.split == TRAIN:
                training_answers[silo_index[row.source]].append(rule.normalize(row.answers[0]))
    classes = [set(rule.classes(answers)) for answers in training_answers]
    questions: list[Question] = []
    picture_names: PictureNames = []
    num_pictures = 0
    for files, rows_of_set in rows:
        names = sorted({row.image for row in rows_of_set})
        image_index = {name: num_pictures + i for i, name in enumerate(names)}
        picture_names.append((files, names))
        num_pictures += len(names)
        for row in rows_of_set:
            silo = silo_index[row.source]
            answers = [rule.normalize(answer) for answer in row.answers]
            answer = next((answer for answer in answers if answer in classes[silo]), answers[0])
            if answer in classes[silo] or not rule.drops_questions:
                closed = is_closed(answers[0], row.answer_type)
                questions.append(Question(image_index[row.image], row.question, answer, closed, row.split, silo))
    require(
        bool(questions),
        f"{source}: there are no questions: set dataset.path to a data set with questions, or dataset.answers=all",
    )
    return questions, picture_names
