"""VQA-RAD: clinicians' questions about radiographs of head, chest and abdomen.

Source: Lau et al., Scientific Data 2018 (osf.io/89kps).
Licence: CC0.
Layout of dataset.path, a folder or a zip, one of::

    VQA_RAD Dataset Public.json      as published
    VQA_RAD Image Folder/

    trainset.json, testset.json      repackaged, as in much released code
    images/

The published file has 1,797 training and 451 test questions about 314 of 315 pictures.  Questions whose phrase_type
begins with "test" are the test part.  The repackaged files have the same test part.  Their training part also has the
1,267 wordings in question_frame, 3,064 questions in total.

Each organ is a natural client.  All 203 test pictures occur in training too: the test part measures answers to new
questions, not to new patients.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedbench.core.options import require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._question_files import Files, QuestionOptions, Row, rows_to_arrays

log = logging.getLogger(__name__)
ORGANS = ("HEAD", "CHEST", "ABD")
PUBLISHED, PICTURES = "VQA_RAD Dataset Public.json", "VQA_RAD Image Folder"
REPACKAGED = {TRAIN: "trainset.json", TEST: "testset.json"}
WHERE = "osf.io/89kps (CC0)"
COUNTS = ((1797, 451), (3064, 451))  # training and test questions, as published and repackaged


@dataclass(kw_only=True)
class VQARad(QuestionOptions):
    """VQA-RAD: inputs image and text, targets [n, 2]: index of the answer, and 1 for a closed question.

    Args:
        path: The folder, or a zip of it.  None: data_dir/vqa_rad.
    """

    path: str | None = None
    color: Literal["rgb", "grey"] = "grey"

    def load(self) -> Arrays:
        """Return all questions, training questions first.  Each organ (head, chest, abdomen) is a natural client."""
        files = Files(Path(self.path or Path(self.data_dir) / "vqa_rad"), "VQA-RAD", where=WHERE)
        rows = read_rows(files)
        num_test = sum(row.split == TEST for row in rows)
        if (len(rows) - num_test, num_test) not in COUNTS:  # as published or repackaged
            log.warning("%s is not a complete VQA-RAD: it has %d training and %d test questions, expected 1,797 or "
                        "3,064, and 451", files.path, len(rows) - num_test, num_test)  # fmt: skip
        return rows_to_arrays([(files, rows)], [organ.lower() for organ in ORGANS], self, "dataset=vqa_rad")


def read_rows(files: Files, source: str | None = None) -> list[Row]:
    """Return all questions, the training questions first.

    Args:
        files: The files of the data set.
        source: The natural client of all questions.  None: the organ.
    """
    # as PUBLISHED, one file for both parts; or REPACKAGED, one file for each part, with pictures in another folder
    if files.has(PUBLISHED) and not files.has(*REPACKAGED.values()):
        folder = PICTURES
        rows = [
            (row, TEST if files.value(row, "phrase_type").startswith("test") else TRAIN)
            for row in files.json(PUBLISHED)
        ]
        rows.sort(key=lambda row_and_split: row_and_split[1])
    else:
        folder = "images"
        # json reads the first of its files that exists: without the repackaged one, its message names both
        rows = [(row, split) for split, name in REPACKAGED.items() for row in files.json(name, PUBLISHED)]
    return [_row(files, folder, row, split, source) for row, split in rows]


def _row(files: Files, folder: str, row: dict, split: int, source: str | None) -> Row:
    """Convert one question from the dict in a file to a Row.

    Args:
        files: The files of the data set.
        folder: The folder of the pictures.
        row: The question's dict in a file.
        split: TRAIN or TEST.
        source: The natural client.  None: the organ.

    Raises:
        ConfigError: A value is missing, or the picture does not exist.
    """
    organ = files.value(row, "image_organ")
    require(
        organ in ORGANS,
        f"{files.key}: a question has image_organ {organ}, expected {', '.join(ORGANS)}: use the published files",
    )
    return Row(
        image=files.find(f"{folder}/{files.value(row, 'image_name')}"),
        question=files.value(row, "question"),
        answers=(files.value(row, "answer"),),
        answer_type=files.value(row, "answer_type"),
        split=split,
        source=source or organ.lower(),
    )
