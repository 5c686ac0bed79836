"""VQA-RAD: clinicians' questions about radiographs of head, chest and abdomen.

Source: Lau et al., Scientific Data 2018 (osf.io/89kps).
Licence: CC0.
Layout of dataset.path, a folder or a zip, one of::

    VQA_RAD Dataset Public.json      as published
    VQA_RAD Image Folder/

    trainset.json, testset.json      repackaged, as in much released code
    images/

As published there are 1,797 training and 451 test questions about 314 of 315 pictures.  Questions whose phrase_type
begins with "test" are the test part.  The repackaged test part is the same.  The 1,267
wordings in question_frame of the published file are training questions as well, 3,064 in total.

An organ is a natural silo.  All 203 test pictures occur in training too: the test part measures answers to new
questions, not to new patients.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from fedbench.core.options import Count, require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._answers import Answers, Kept, Normalizer
from fedbench.data.questions._question_files import Files, Layout, Row, assembled

log = logging.getLogger(__name__)
ORGANS = ("HEAD", "CHEST", "ABD")
PUBLISHED, PICTURES = "VQA_RAD Dataset Public.json", "VQA_RAD Image Folder"
REPACKAGED = {TRAIN: "trainset.json", TEST: "testset.json"}
WHERE = "osf.io/89kps (CC0)"
COUNTS = ((1797, 451), (3064, 451))  # training and test questions, as published and repackaged


class VQARad:
    """inputs image uint8 [m, 1 or 3, side, side], each stored once, and text int64 [n, tokens]; targets [n, 2]
    (data/questions/_questions.py).

    path: the folder, or a zip of it; null: data_dir/vqa_rad.  side: pixels; color: rgb or grey.  tokens: of a question,
    the ends included.  vocab: null for the words of the training questions, or a vocab.txt of WordPiece (a folder's
    name is enough).  min_count, answers, normalizer: which answers are classes, and how they are compared
    (data/questions/_answers.py).
    """

    def __init__(
        self,
        path: str | None = None,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "grey",
        tokens: Count = 24,
        vocab: str | None = None,
        min_count: Count = 1,
        answers: Kept = "all",
        normalizer: Normalizer = "plain",
        data_dir: str = "data",
    ):
        self.path = Path(path or Path(data_dir) / "vqa_rad")
        self.layout = Layout(side, color, tokens, vocab, data_dir, Answers(min_count, answers, normalizer))

    def load(self) -> Arrays:
        """Training questions first, as published."""
        files = Files(self.path, "VQA-RAD", WHERE)
        asked = rows(files)
        tested = sum(row.split == TEST for row in asked)
        if (len(asked) - tested, tested) not in COUNTS:
            log.warning("%s is no complete VQA-RAD: it has %d training and %d test questions, expected 1,797 or 3,064, "
                        "and 451", self.path, len(asked) - tested, tested)  # fmt: skip
        return assembled([(files, asked)], [o.lower() for o in ORGANS], self.layout, "dataset=vqa_rad")


def rows(files: Files, source: str | None = None) -> list[Row]:
    """Return all questions, with the training questions first.  source: their silo; None: the organ."""
    if files.has(PUBLISHED) and not files.has(*REPACKAGED.values()):
        folder, asked = PICTURES, [(row, _split(files.value(row, "phrase_type"))) for row in files.json(PUBLISHED)]
        asked.sort(key=lambda question: question[1])
    else:
        folder = "images"
        asked = [(row, split) for split, name in REPACKAGED.items() for row in files.json(name, PUBLISHED)]
    return [_row(files, folder, row, split, source) for row, split in asked]


def _split(phrase_type: str) -> int:
    """Return the part of a phrase_type: test_freeform and test_para are in the test part."""
    return TEST if phrase_type.startswith("test") else TRAIN


def _row(files: Files, folder: str, row: dict, split: int, source: str | None) -> Row:
    image = files.find(f"{folder}/{files.value(row, 'image_name')}")
    organ = files.value(row, "image_organ")
    require(organ in ORGANS, f"dataset.path={files.path}: {organ} is none of the organs {', '.join(ORGANS)}")
    answer, kind = files.value(row, "answer"), files.value(row, "answer_type")
    return Row(image, files.value(row, "question"), (answer,), kind, split, source or organ.lower())
