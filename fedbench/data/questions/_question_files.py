"""Published files of questions about pictures: a folder or a zip, the table of questions, and the arrays it becomes.

A reader lists rows; what comes after (answers of each silo, pictures that are stored once, tokens) is the same for all.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.cores import cores
from fedbench.core.options import ConfigError, require
from fedbench.data._depth import Window
from fedbench.data._files import cached_array, fingerprint, is_hidden, log, require_unpackable
from fedbench.data._images import BLOCK, READER, fill, open_picture, window_of
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.questions._answers import EVERY, Answers, is_closed
from fedbench.data.questions._questions import Question, arrays_of, by_words, vocabulary

KEPT = 64 << 20  # bytes of decoded pictures from which on they are left on disk
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".gif")


class Files:
    """Those of a folder, or of a zip of it, also where it lies in a folder of its own there."""

    def __init__(self, path: Path, name: str, where: str):
        """name: of the data set; where: it can be had, for the sentence about its absence."""
        require(path.exists(), f"dataset.path={path}: {name} is not there; it is at {where}")
        self.path, self.name = path, name
        try:
            self.zip = zipfile.ZipFile(path) if path.is_file() else None
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"dataset.path={path} is neither a folder nor a zip ({error})") from error

    @cached_property
    def names(self) -> list[str]:
        """Return the sorted relative paths of all files that are not hidden."""
        if self.zip is not None:
            names = [name for name in self.zip.namelist() if not name.endswith("/")]
        else:
            found = (Path(top) / file for top, _, files in os.walk(self.path) for file in files)
            names = [file.relative_to(self.path).as_posix() for file in found]
        return sorted(name for name in names if not any(map(is_hidden, name.split("/"))))

    @cached_property
    def _by_end(self) -> dict[str, str]:
        """By its last part every name, the one that lies highest."""
        ends: dict[str, str] = {}
        for name in sorted(self.names, key=lambda n: (n.count("/"), n)):
            parts = name.split("/")
            for i in range(len(parts)):
                ends.setdefault("/".join(parts[i:]), name)
        return ends

    def has(self, *ends: str) -> bool:
        """Return whether each of these path endings matches a file."""
        return all(end in self._by_end for end in ends)

    def find(self, *ends: str) -> str:
        """The file whose name ends in one of these; ConfigError where there is none."""
        found = next((self._by_end[end] for end in ends if end in self._by_end), None)
        if found is None:
            raise ConfigError(f"dataset.path={self.path}: {' or '.join(ends)} of {self.name} is not there")
        return found

    def open(self, name: str) -> Path | io.BytesIO:
        """A file, to be opened."""
        if self.zip is None:
            return self.path / name
        require_unpackable(self.zip.getinfo(name), f"dataset.path={self.path}: {name}")
        return io.BytesIO(self.zip.read(name))

    def text(self, *ends: str) -> str:
        """What stands in a file."""
        name = self.find(*ends)
        try:
            file = self.open(name)
            found = file.read_bytes() if isinstance(file, Path) else file.read()
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"dataset.path={self.path}: {name} cannot be read ({error})") from error
        return found.decode("utf-8-sig", errors="replace")

    def json(self, *ends: str) -> list[dict[str, Any]]:
        """Rows of a JSON file."""
        try:
            rows = json.loads(self.text(*ends))
        except ValueError as error:
            raise ConfigError(f"dataset.path={self.path}: {self.find(*ends)} cannot be read ({error})") from error
        require(
            isinstance(rows, list) and all(isinstance(row, dict) for row in rows),
            f"dataset.path={self.path}: {self.find(*ends)} is no list of questions",
        )
        return rows

    def value(self, row: dict[str, Any], *keys: str) -> str:
        """What a row has under the first of these keys that it has; ConfigError where it has none."""
        found = next((row[key] for key in keys if row.get(key) is not None), None)
        if found is None:
            raise ConfigError(f"dataset.path={self.path}: a question of {self.name} has no {keys[0]}: {str(row)[:80]}")
        return str(found).strip()

    def stamp(self, names: Sequence[str]) -> object:
        """What changes when one of these files does."""
        return fingerprint(self.path) if self.zip is not None else [fingerprint(self.path / name) for name in names]


@dataclass(frozen=True)
class Row:
    """One question.  image: a file's name in its Files.  answers: the right ones, as published; of a question that is
    not trained on there may be several.  answer_type: open or closed, None where the data set does not say.  split: as
    in `Arrays`.  source: the silo."""

    image: str
    question: str
    answers: tuple[str, ...]
    answer_type: str | None
    split: int
    source: str


@dataclass(frozen=True)
class Layout:
    """What pictures and texts become.  side: pixels; color: rgb or grey; tokens: of a text, the ends included; vocab:
    null for the words of the training texts, or a vocab.txt of WordPiece (or its folder); data_dir: of the cache;
    answers: which of them are classes."""

    side: int
    color: str
    tokens: int
    vocab: str | None
    data_dir: str
    answers: Answers = EVERY

    def tokenizer(self, training: Sequence[str]) -> Callable[[Sequence[str]], np.ndarray]:
        """From texts to numbers [n, tokens] int64; training: those whose words are known."""
        if self.vocab is None:
            known = vocabulary(training)
            return lambda texts: by_words(texts, known, self.tokens)
        from fedbench.data.text._wordpiece import tokenize

        file = Path(self.vocab)
        file = file / "vocab.txt" if file.is_dir() else file
        return lambda texts: np.asarray(tokenize(list(texts), file, self.tokens))

    def _picture(self, files: Files, window: Window | None, name: str) -> np.ndarray:
        return open_picture(files.open(name), self.side, self.color, window)

    def pictures(self, listed: Sequence[tuple[Files, Sequence[str]]], name: str) -> np.ndarray:
        """Files' pictures, one set after the other [m, channels, side, side] uint8; many of them are decoded once and
        left on disk."""
        n = sum(len(some) for _, some in listed)
        shape = (n, 3 if self.color == "rgb" else 1, self.side, self.side)

        def decoded() -> Iterator[np.ndarray]:
            with ThreadPoolExecutor(cores()) as pool:  # in slices: all files at once would fill the memory
                for files, names in listed:
                    window = window_of(names, None, f"{name} ({files.path})", files.open)
                    read = partial(self._picture, files, window)
                    for start in range(0, len(names), BLOCK):
                        yield from pool.map(read, names[start : start + BLOCK])

        if np.prod(shape) < KEPT:
            return fill(decoded(), n, shape[1:])
        key = ([(str(files.path), some, files.stamp(some)) for files, some in listed], self.side, self.color, READER)

        def blocks() -> Iterator[np.ndarray]:
            log.info("%s: decoding %s pictures once", name, f"{n:,}")
            return (picture[None] for picture in decoded())

        return cached_array(self.data_dir, name, key, shape, blocks)


Read = Sequence[tuple[Files, Sequence[Row]]]
Listed = list[tuple[Files, Sequence[str]]]


def assembled(read: Read, silos: Sequence[str], layout: Layout, source: str) -> Arrays:
    """The arrays of rows, set after set.  silos: their sources, in order.  source: who says so, for sentences."""
    questions, listed = questions_of(read, silos, source, layout.answers)
    tokens = layout.tokenizer([q.question for q in questions if q.split == TRAIN])
    pictures = layout.pictures(listed, source.removeprefix("dataset="))
    return arrays_of(questions, pictures, tokens, silos, source, layout.answers)


def questions_of(read: Read, silos: Sequence[str], source: str, rule: Answers) -> tuple[list[Question], Listed]:
    """The questions, but those that the rule drops, and by file the names of the pictures that they number.  Of several
    right answers the first that is among the silo's is asked for."""
    number = {silo: i for i, silo in enumerate(silos)}
    trained: list[list[str]] = [[] for _ in silos]
    for _, rows in read:
        for row in rows:
            if row.split == TRAIN:
                trained[number[row.source]].append(rule.written(row.answers[0]))
    known = [set(rule.classes(own)) for own in trained]
    questions: list[Question] = []
    listed: Listed = []
    before = 0
    for files, rows in read:
        names = sorted({row.image for row in rows})
        place = {name: before + i for i, name in enumerate(names)}
        listed.append((files, names))
        before += len(names)
        for row in rows:
            silo, answers = number[row.source], [rule.written(answer) for answer in row.answers]
            answer = next((a for a in answers if a in known[silo]), answers[0])
            closed = is_closed(answers[0], row.answer_type)
            if rule.kept == "top100_drop" and answer not in known[silo]:
                continue
            questions.append(Question(place[row.image], row.question, answer, closed, row.split, silo))
    require(bool(questions), f"{source}: there are no questions")
    return questions, listed
