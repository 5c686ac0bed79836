"""Shakespeare by speaker: the next character of what each role of each play says, as in LEAF (Caldas et al., 2018).

Source: Caldas et al., LEAF, 2018 (leaf.cmu.edu); plays of Project Gutenberg, of which three come along
(plays/SOURCE.md).
Licence: the plays are in the public domain.
Layout of dataset.path, one of::

    train/*.json, test/*.json      LEAF's, cut into parts
    all_data/*.json                LEAF's, not cut; sampled_data and rem_user_data before it
    *.txt                          plays, or the complete works in one file (_plays.py)

  Departs from LEAF: other characters than its 80, which it numbers -1, are
spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError, Count, NonNegativeInt, OpenUnit, require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.text._plays import plays_of, words
from fedbench.data.text._speech import Windows, arrays_of, cut, encoded, windows

BUNDLED = Path(__file__).parent / "plays"
SOURCE = "dataset=shakespeare"
UNCUT = ("rem_user_data", "sampled_data", "all_data")  # LEAF's folders, the last step of its preparation first
WANTED = "LEAF's JSON files (or train and test with such), or plays as .txt"


class Shakespeare:
    """inputs text int64 [n, length], targets int64 [n] in [0, 80); each speaker of a play is a natural silo.

    path: null for the plays that come with fedbench; a file or a folder, see above.  length: characters of a window; of
    LEAF's files, which have 80, the last ones.  stride: characters from one window to the next; 1 uses all.  test:
    share of a speaker's windows, its last ones, that is tested on, where LEAF has not cut into train and test.
    min_samples: windows at stride 1 that a speaker has at least (LEAF's -k).
    """

    def __init__(
        self,
        path: str | None = None,
        length: Count = 80,
        stride: Count = 1,
        test: OpenUnit = 0.2,
        min_samples: NonNegativeInt = 0,
    ):
        self.path = BUNDLED if path is None else Path(path)
        self.length, self.stride, self.test = length, stride, test
        self.min_samples = min_samples

    def load(self) -> Arrays:
        """Read the texts; ConfigError where there are none, or nobody says enough."""
        require(self.path.exists(), f"dataset.path={self.path} is not there: it wants {WANTED}")
        files = _files(self.path)
        if "train" in files:
            return self._of(_published(files["train"], files["test"], self.length))
        if "json" in files:
            return self._of((user, *_read(user, data, self.length)) for user, data in _users(files["json"]))
        return self._of(_said(files["txt"]))

    def _of(self, speakers: Iterator[tuple[Any, ...]]) -> Arrays:
        """Speakers as (name, words), (name, text, target) or with the split that LEAF made."""
        kept = [one for one in speakers if self._count(one[1]) >= max(self.min_samples, 1)]
        require(
            bool(kept),
            f"{SOURCE}: no speaker in {self.path} has dataset.min_samples={self.min_samples:,} windows of "
            f"{self.length} characters",
        )
        return arrays_of([self._windows(*one) for one in kept], SOURCE)

    def _count(self, text: str | np.ndarray) -> int:
        """Return the number of windows at stride 1 of a speaker's words, or of windows that LEAF has cut."""
        return len(text) - self.length if isinstance(text, str) else len(text)

    def _windows(
        self, name: str, text: Any, target: np.ndarray | None = None, split: np.ndarray | None = None
    ) -> Windows:
        if target is None:
            return windows(name, text, self.length, self.stride, self.test)
        if split is None:
            start, split = cut(len(target), text.shape[1], self.stride, self.test)
            return Windows(name, text[start], target[start], split)
        parts = [np.flatnonzero(split == part)[:: self.stride] for part in (TRAIN, TEST)]
        used = np.concatenate(parts)
        return Windows(name, text[used], target[used], split[used])


def _files(path: Path) -> dict[str, list[Path]]:
    """What there is to read: "train" and "test", "json" or "txt"."""
    if path.is_file():
        kind = "json" if path.suffix == ".json" else "txt"
        return {kind: [path]}
    both = {part: sorted((path / part).glob("[!.]*.json")) for part in ("train", "test")}
    if all(both.values()):
        return both
    for folder in (path, *(path / name for name in UNCUT)):
        if found := sorted(folder.glob("[!.]*.json")):
            return {"json": found}
    found = sorted(path.glob("[!.]*.txt"))
    require(bool(found), f"dataset.path={path} holds neither: {WANTED}")
    return {"txt": found}


def _said(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Each speaker of each play, and all that it says."""
    for file in files:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")  # older files of Project Gutenberg
        for title, speeches in plays_of(text, file.stem).items():
            for speaker, lines in speeches.items():
                yield "_".join(f"{title}_{speaker}".split()), words(lines)


def _users(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each user of LEAF's files who has samples, with its x and y."""
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            for user in content["users"]:
                data = content["user_data"][user]
                if len(data["x"]) != len(data["y"]):
                    raise ValueError(f"{user} has {len(data['x']):,} x and {len(data['y']):,} y")
                if data["y"]:
                    yield user, data
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is not one of LEAF's files with users and user_data: {error!r}") from error


def _read(user: str, data: dict[str, Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    """A user's windows [n, length], and what follows them [n]."""
    require(
        all(isinstance(text, str) for text in (*data["x"], *data["y"])),
        f"{SOURCE}: {user} has samples that are no text, as in LEAF's FEMNIST or Sent140, and this set is of "
        "text to go on with: write pictures as arrays X, y and client by numpy.savez, for dataset=npz partition=domain",
    )
    lengths = {len(x) for x in data["x"]}
    require(
        all(size >= length for size in lengths) and len(lengths) <= 1 and all(len(y) == 1 for y in data["y"]),
        f"{SOURCE}: {user} has x of {', '.join(map(str, sorted(lengths)))} characters; LEAF's have 80, and y 1: "
        f"dataset.length={length} must be no more, and all the same",
    )
    text = encoded("".join(data["x"])).reshape(len(data["x"]), -1)[:, -length:]
    return text, encoded("".join(data["y"]))


def _published(
    train: list[Path], test: list[Path], length: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """As LEAF has cut them; a user of one part alone is none."""
    tested = dict(_users(test))
    for user, data in _users(train):
        if user in tested:
            (x, y), (later, next_) = _read(user, data, length), _read(user, tested[user], length)
            split = np.repeat(np.array([TRAIN, TEST], np.int8), [len(y), len(next_)])
            yield user, np.concatenate([x, later]), np.concatenate([y, next_]), split
