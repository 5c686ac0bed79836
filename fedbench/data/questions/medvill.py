"""Chest radiographs with their reports and 15 labels, in MedViLL's pair files: FedPIA's Tasks 3 and 4.

Source: Moon et al., JBHI 2022 (github.com/SuperSupermoon/MedViLL): 3,547 pairs of Open-I, and those of MIMIC-CXR.
Licence: that of the pictures' data sets; MIMIC-CXR needs PhysioNet's agreement.  Nothing is downloaded.
Layout of dataset.path::

    Train.jsonl, Valid.jsonl, Test.jsonl     one dict per line: id, text, label ("'Edema', 'Fracture'" or empty), img

FedPIA's training parts are 2,837 and 73,348 samples, 80% of all pairs, and it does not publish which.  Here all pairs
are pooled and split at random.  The labels were extracted from the reports, so that text alone nearly determines them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbench.core.options import Count, OpenUnit, Seed, require
from fedbench.core.rng import generator
from fedbench.data._images import half_per_channel
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._question_files import Files, PictureTextOptions

PARTS = ("Train.jsonl", "Valid.jsonl", "Test.jsonl")
OTHERS = "Others"
LABELS = (  # in the paper's order
    *("Support Devices", "Pleural Effusion", "Consolidation", "Pneumothorax", "Lung Opacity"),
    *("Enlarged Cardiomediastinum", "Atelectasis", OTHERS, "Cardiomegaly", "Lung Lesion", "Edema", "Fracture"),
    *("Pneumonia", "Pleural Other", "No Finding"),
)
WHERE = "github.com/SuperSupermoon/MedViLL (Open-I), physionet.org (MIMIC-CXR, after its training and agreement)"


@dataclass(kw_only=True)
class MedViLL(PictureTextOptions):
    """MedViLL's pairs: inputs image and text, targets multi-hot [n, 15].

    `tokens` is the length of a report.

    Args:
        path: A folder of the three files and their pictures, or a zip of it.  None: data_dir/medvill.
        test: The fraction of all pairs that is tested on.
        seed: Seed of the split.
    """

    path: str | None = None
    test: OpenUnit = 0.2
    seed: Seed = 0
    color: Literal["rgb", "grey"] = "grey"
    tokens: Count = 40

    def load(self) -> Arrays:
        """Return all pairs of a radiograph and a report in file order; a random fraction ``test`` is the test part."""
        pairs = self.pairs()
        # a function from texts to token ids, whose vocabulary is that of the training texts
        tokens = self.tokenizer([text for text, part in zip(pairs.texts, pairs.split) if part == TRAIN])
        pictures = self.pictures([(pairs.files, pairs.pictures)], "medvill")
        return Arrays(
            inputs={"image": pictures, "text": tokens(pairs.texts)},
            targets=np.array(pairs.labels, np.float32),
            split=pairs.split,
            num_classes=len(LABELS),
            task="multilabel",
            class_names=list(LABELS),
            mean=half_per_channel(pictures),
            std=half_per_channel(pictures),
        ).check()

    def pairs(self, limit: int | None = None) -> Pairs:
        """Return pairs of a radiograph and a report, in the order of the files and split at random.

        Args:
            limit: The largest number of pairs, sampled before the split.  None: all.

        Raises:
            ConfigError: The files are absent or damaged, or have fewer than two pairs.
        """
        files = Files(Path(self.path or Path(self.data_dir) / "medvill"), "MedViLL's pairs", where=WHERE)
        rows = [row for name in PARTS for row in _rows(files, name)]  # PARTS: names of MedViLL's files
        require(
            len(rows) > 1,
            f"{files.key}: {', '.join(PARTS)} have {len(rows)} pair(s), too few to split: use files with at least 2",
        )
        order = generator(self.seed, "medvill").permutation(len(rows))[:limit]  # the first ones are training pairs
        split = np.full(len(rows), TEST, np.int8)
        split[order[: num_train(len(order), self.test)]] = TRAIN
        used = np.sort(order)
        pairs = [rows[i] for i in used]
        return Pairs(
            files=files,
            pictures=[_picture(files, row) for row in pairs],
            texts=[str(row.get("text") or "") for row in pairs],
            labels=[_labels(files, row) for row in pairs],
            split=split[used],
        )


@dataclass(frozen=True)
class Pairs:
    """The n radiographs of a data set, and their reports.

    Attributes:
        files: The files of the data set.
        pictures: The names of the radiographs [n].
        texts: The reports [n].
        labels: Whether each of LABELS is true [n][15].
        split: The part of each pair [n] int8.
    """

    files: Files
    pictures: list[str]
    texts: list[str]
    labels: list[list[bool]]
    split: np.ndarray


def num_train(n: int, test: float) -> int:
    """Return the number of training pairs, (1 - test) n rounded down.

    Args:
        n: The number of all pairs.
        test: The fraction of test pairs.
    """
    return int((1 - test) * n + 1e-9)  # 1e-9: rounding errors must not turn 4 = (1 - 0.2) * 5 into 3


def _rows(files: Files, name: str) -> list[dict[str, Any]]:
    """Return the dicts in a file of JSON lines.  Empty lines are skipped.

    Args:
        files: The files of the data set.
        name: The path ending of the file.

    Raises:
        ConfigError: The file does not exist, or a line is no JSON dict.
    """
    rows = []
    for number, line in enumerate(files.text(name).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            require(
                isinstance(row, dict),
                f"{files.key}: {name}, line {number} must be a JSON dict, but is {line[:60]!r}: use MedViLL's file",
            )
            rows.append(row)
    return rows


def _picture(files: Files, row: dict[str, Any]) -> str:
    """Return the relative path of a pair's picture.

    The value img in the file is a path.  The picture may be in another folder, so that it is searched by the longest
    ending of this path that has a file.

    Args:
        files: The files of the data set.
        row: The pair's dict in a file.
    """
    parts = files.value(row, "img").replace("\\", "/").split("/")
    endings = ("/".join(parts[i:]) for i in range(max(1, len(parts) - 1)))  # with at least two parts, if there are two
    return files.find(*endings)


def _labels(files: Files, row: dict[str, Any]) -> list[bool]:
    """Return whether a pair has each of LABELS, in their order.

    Args:
        files: The files of the data set, for messages.
        row: The pair's dict in a file.  Without labels, the pair has the label "Others".

    Raises:
        ConfigError: A label is not one of LABELS.
    """
    labels = {item.strip().strip("'\"").strip() for item in str(row.get("label") or "").split(",")} - {""} or {OTHERS}
    unknown = sorted(labels - set(LABELS))
    require(
        not unknown,
        f"{files.key}: the labels {', '.join(unknown)} are not among {', '.join(LABELS)}: use MedViLL's files",
    )
    return [label in labels for label in LABELS]
