"""Chest radiographs with their reports and 15 labels, in MedViLL's pair files: FedPIA's Tasks 3 and 4.

Source: Moon et al., JBHI 2022 (github.com/SuperSupermoon/MedViLL): 3,547 pairs of Open-I, and those of MIMIC-CXR.
Licence: that of the pictures' data sets; MIMIC-CXR needs PhysioNet's agreement.  Nothing is downloaded.
Layout of dataset.path::

    Train.jsonl, Valid.jsonl, Test.jsonl     a dict a line: id, text, label ("'Edema', 'Fracture'", empty for none), img

FedPIA's training parts are 2,837 and 73,348 samples, 80% of all pairs: so all are pooled and cut anew.  It does not say
which are taken.  Reports were what the labels were read from: text alone nearly tells them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbench.core.options import Count, OpenUnit, Seed, require
from fedbench.core.rng import generator
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._question_files import Files, Layout

PARTS = ("Train.jsonl", "Valid.jsonl", "Test.jsonl")
OTHERS = "Others"
LABELS = (  # in the paper's order
    *("Support Devices", "Pleural Effusion", "Consolidation", "Pneumothorax", "Lung Opacity"),
    *("Enlarged Cardiomediastinum", "Atelectasis", OTHERS, "Cardiomegaly", "Lung Lesion", "Edema", "Fracture"),
    *("Pneumonia", "Pleural Other", "No Finding"),
)
WHERE = "github.com/SuperSupermoon/MedViLL (Open-I), physionet.org (MIMIC-CXR, after its training and agreement)"


class MedViLL:
    """inputs image uint8 [n, 1 or 3, side, side] and text int64 [n, tokens]; targets multi-hot [n, 15].

    path: a folder of the three files and the pictures they name, or a zip of it; null: data_dir/medvill.  test: the
    share of all pairs that is tested on, drawn from seed.  side, color, vocab: see VQARad.  tokens: of a report, which
    is cut off there.
    """

    def __init__(
        self,
        path: str | None = None,
        test: OpenUnit = 0.2,
        seed: Seed = 0,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "grey",
        tokens: Count = 40,
        vocab: str | None = None,
        data_dir: str = "data",
    ):
        self.path, self.test, self.seed = Path(path or Path(data_dir) / "medvill"), test, seed
        self.layout = Layout(side, color, tokens, vocab, data_dir)

    def load(self) -> Arrays:
        """All pairs, in the files' order."""
        pairs = self.pairs()
        tokens = self.layout.tokenizer([text for text, part in zip(pairs.texts, pairs.split) if part == TRAIN])
        pictures = self.layout.pictures([(pairs.files, pairs.pictures)], "medvill")
        return Arrays(
            {"image": pictures, "text": tokens(pairs.texts)},
            np.array(pairs.labels, np.float32),
            pairs.split,
            len(LABELS),
            task="multilabel",
            class_names=list(LABELS),
            mean=(0.5,) * pictures.shape[1],
            std=(0.5,) * pictures.shape[1],
        ).check()

    def pairs(self, most: int | None = None) -> Pairs:
        """In the files' order.  most: how many are drawn, before the cut, where there are more; None: all."""
        files = Files(self.path, "MedViLL's pairs", WHERE)
        rows = [row for name in PARTS for row in _rows(files, name)]
        require(
            len(rows) > 1, f"dataset.path={files.path}: {', '.join(PARTS)} hold {len(rows)} pair(s), too few to cut"
        )
        drawn = generator(self.seed, "medvill").permutation(len(rows))[:most]
        split = np.full(len(rows), TEST, np.int8)
        split[drawn[: num_trained(len(drawn), self.test)]] = TRAIN
        kept = [rows[i] for i in sorted(drawn)]
        return Pairs(
            files,
            [_picture(files, row) for row in kept],
            [str(row.get("text") or "") for row in kept],
            [_labels(files, row) for row in kept],
            split[np.sort(drawn)],
        )


@dataclass(frozen=True)
class Pairs:
    """n radiographs: their names in files, reports, which of LABELS they have, and the part [n] that each is of."""

    files: Files
    pictures: list[str]
    texts: list[str]
    labels: list[list[bool]]
    split: np.ndarray


def num_trained(n: int, test: float) -> int:
    """How many of n pairs are not tested on."""
    return int((1 - test) * n + 1e-9)  # (1 - 0.2) * 5 is 4, whatever its last bit


def _rows(files: Files, name: str) -> list[dict[str, Any]]:
    """A line is a row."""
    rows = []
    for number, line in enumerate(files.text(name).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            require(isinstance(row, dict), f"dataset.path={files.path}: {name}, line {number} is no JSON dict")
            rows.append(row)
    return rows


def _picture(files: Files, row: dict[str, Any]) -> str:
    """By its published path, else by what follows that path's first folders, as others unpack it elsewhere."""
    parts = files.value(row, "img").replace("\\", "/").split("/")
    return files.find(*("/".join(parts[i:]) for i in range(max(1, len(parts) - 1))))


def _labels(files: Files, row: dict[str, Any]) -> list[bool]:
    """Which of LABELS stand in the row; without any: Others."""
    said = {item.strip().strip("'\"").strip() for item in str(row.get("label") or "").split(",")} - {""} or {OTHERS}
    odd = sorted(said - set(LABELS))
    require(not odd, f"dataset.path={files.path}: {', '.join(odd)} is none of the labels {', '.join(LABELS)}")
    return [label in said for label in LABELS]
