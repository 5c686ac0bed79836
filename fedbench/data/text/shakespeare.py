"""Shakespeare by speaker: predict the next character of what each role of each play says, as in LEAF.

Source: Caldas et al., LEAF, 2018 (leaf.cmu.edu); plays of Project Gutenberg, three of which are included
(plays/SOURCE.md).
Licence: the plays are in the public domain.
Layout of dataset.path, one of::

    train/*.json, test/*.json      LEAF's, split
    all_data/*.json                LEAF's, not split; or sampled_data, rem_user_data
    *.txt                          plays, or the complete works in one file (_plays.py)

Departs from LEAF: characters other than its 80, which have the index -1 there, become spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError, Count, NonNegativeInt, OpenUnit, require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.text._plays import join_lines, split_plays
from fedbench.data.text._speech import Windows, cut_windows, encode, select_windows, speaker_arrays

BUNDLED = Path(__file__).parent / "plays"
SOURCE = "dataset=shakespeare"
NOT_SPLIT = ("rem_user_data", "sampled_data", "all_data")  # LEAF's folders, the last step of its preparation first
EXPECTED = "LEAF's JSON files (or train and test with such), or plays as .txt"


@dataclass
class Shakespeare:
    """Shakespeare's roles: inputs text int64 [n, length], targets int64 [n] in [0, 80).

    Each role of a play is a natural client.

    Args:
        path: A file or a folder (see the module).  None: the included plays.
        length: Characters of a window; the last ones of LEAF's windows, which have 80.
        stride: Characters from one window to the next.
        test: The fraction of a role's windows that is tested on, unless LEAF has split them.
        min_samples: The smallest number of a role's windows at stride 1 (LEAF's -k).
    """

    path: str | None = None
    length: Count = 80
    stride: Count = 1
    test: OpenUnit = 0.2
    min_samples: NonNegativeInt = 0

    def load(self) -> Arrays:
        """Return the windows of all roles or users with enough of them.  Without a path, those of the BUNDLED plays.

        Raises:
            ConfigError: There are no texts, or they are too short.
        """
        path = BUNDLED if self.path is None else Path(self.path)
        require(path.exists(), f"dataset.path={path} does not exist: set it to {EXPECTED}")
        files = find_files(path)
        if "train" in files:
            speakers = self._split_users(files["train"], files["test"])
        elif "json" in files:
            speakers = self._unsplit_users(files["json"])
        else:
            speakers = self._roles(files["txt"])
        # count: the number of a speaker's windows at stride 1
        used = [windows for count, windows in speakers if count >= max(self.min_samples, 1)]
        require(
            bool(used),
            f"{SOURCE}: no speaker in {path} has dataset.min_samples={self.min_samples:,} windows of {self.length} "
            "characters: lower dataset.min_samples",
        )
        return speaker_arrays(used, SOURCE)

    def _roles(self, files: list[Path]) -> Iterator[tuple[int, Windows]]:
        """Yield (number of windows at stride 1, selected windows) for each role of each play.

        Roles with too few windows at stride 1 are dropped later.  Selected are every stride-th window, of which the
        last ones, the fraction `self.test`, are test samples.

        Args:
            files: Text files of plays.
        """
        for speaker, speech in speeches_of(files):
            windows = cut_windows(speaker, speech, self.length, self.stride, self.test)
            yield len(speech) - self.length, windows

    def _unsplit_users(self, files: list[Path]) -> Iterator[tuple[int, Windows]]:
        """Yield (number of windows at stride 1, selected windows) for each user of LEAF, a role of a play.

        The option ``test`` is the fraction of test windows.

        Args:
            files: LEAF's JSON files without a split into training and test.
        """
        for user, data in _users(files):
            text, target = self._read(user, data)
            start, split = select_windows(len(target), text.shape[1], self.stride, self.test)
            yield len(target), Windows(user, text[start], target[start], split)

    def _split_users(self, train: list[Path], test: list[Path]) -> Iterator[tuple[int, Windows]]:
        """Yield the number of windows, and every stride-th window, of each user in files that LEAF has split.

        Users that are in one part only are left out.

        Args:
            train: The files of the training part.
            test: The files of the test part.
        """
        test_data = dict(_users(test))
        for user, data in _users(train):
            if user not in test_data:
                continue
            parts = [self._read(user, data), self._read(user, test_data[user])]
            count = sum(len(target) for _, target in parts)
            # Each part keeps every stride-th window.
            text = np.concatenate([text[:: self.stride] for text, _ in parts])
            targets = [target[:: self.stride] for _, target in parts]
            split = np.repeat(np.array([TRAIN, TEST], np.int8), [len(target) for target in targets])
            yield count, Windows(user, text, np.concatenate(targets), split)

    def _read(self, user: str, data: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows and the next characters of a user of LEAF.

        Args:
            user: The name of the user, for messages.
            data: The user's windows "x" and next characters "y", lists of n strings.

        Returns:
            Indices of the last `length` characters of each window [n, length], and of the next characters [n].
        """
        require(
            all(isinstance(text, str) for text in (*data["x"], *data["y"])),
            f"{SOURCE}: the user {user} has samples that are not text, as in LEAF's FEMNIST or Sent140, and this data "
            "set predicts text: write pictures as arrays X, y and client by numpy.savez, for dataset=npz "
            "partition=domain",
        )
        lengths = {len(x) for x in data["x"]}
        require(
            all(size >= self.length for size in lengths) and len(lengths) <= 1 and all(len(y) == 1 for y in data["y"]),
            f"{SOURCE}: the user {user} has x of {', '.join(map(str, sorted(lengths)))} characters, expected one "
            f"length of at least dataset.length={self.length} (LEAF's have 80), and y of 1 character: make all x of "
            "the file equally long, or lower dataset.length if they are shorter than it",
        )
        text = encode("".join(data["x"])).reshape(len(data["x"]), -1)[:, -self.length :]
        return text, encode("".join(data["y"]))


def speeches_of(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (name of the play and the role, all that the role says) for each role of each play.

    Args:
        files: Text files of plays.
    """
    for file in files:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")  # older files of Project Gutenberg
        for title, speeches in split_plays(text, file.stem).items():
            for role, lines in speeches.items():
                yield "_".join(f"{title}_{role}".split()), join_lines(lines)


def find_files(path: Path) -> dict[str, list[Path]]:
    """Find the text files at a path, and their layout: LEAF's JSON files, split or not, or plays in plain text.

    Args:
        path: A file, or a folder with files of one of the layouts.

    Returns:
        A dict with files under "train" and "test" (LEAF's, split), "json" (LEAF's, not split), or "txt" (plays).
    """
    if path.is_file():
        return {"json" if path.suffix == ".json" else "txt": [path]}
    split = {part: sorted((path / part).glob("[!.]*.json")) for part in ("train", "test")}
    if all(split.values()):
        return split
    for folder in (path, *(path / name for name in NOT_SPLIT)):  # folders that LEAF makes before it splits the data
        if files := sorted(folder.glob("[!.]*.json")):
            return {"json": files}
    files = sorted(path.glob("[!.]*.txt"))
    require(bool(files), f"dataset.path={path} has no texts: set it to {EXPECTED}")
    return {"txt": files}


def _users(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, samples) for each user with samples in LEAF's JSON files.

    Samples are a dict of lists of the same length: windows "x" and next characters "y".

    Raises:
        ConfigError: A file has another format.
    """
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            for user in content["users"]:
                data = content["user_data"][user]
                if len(data["x"]) != len(data["y"]):
                    raise ValueError(f"{user} has {len(data['x']):,} x and {len(data['y']):,} y, which must be equal")
                if data["y"]:
                    yield user, data
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} is not one of LEAF's files with users and user_data: {error!r}; replace it, or set "
                f"dataset.path to {EXPECTED}"
            ) from error
