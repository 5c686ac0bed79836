"""Questions about medical pictures of several published data sets, each a natural client: FedPIA's Task 1.

Sources: SLAKE (Liu et al., ISBI 2021; huggingface.co/datasets/BoKelvin/SLAKE), its English questions; VQA-Med 2019,
2020 and 2021 (Ben Abacha et al., ImageCLEF; zenodo.org/records/10499039, github.com/abachaa, and for 2020's training
part aicrowd.com); VQA-RAD (vqa_rad.py).
Licences: CC BY 4.0, VQA-RAD CC0.
Layout: folders or zips as published, in data_dir or at dataset.paths::

    data_dir/slake/, vqa_rad/, vqa_med_2019/, vqa_med_2020/, vqa_med_2021/

Test parts are the official ones.  FedPIA's test parts of 2020, 2021 and VQA-RAD have other sizes, by an unpublished
rule.  Validation parts are not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedbench.core.options import require
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.questions import vqa_rad
from fedbench.data.questions._question_files import PICTURES, Files, QuestionOptions, Row, rows_to_arrays

IMAGECLEF = "zenodo.org/records/10499039, github.com/abachaa and aicrowd.com (CC BY 4.0)"
CATEGORIES = ("modality", "plane", "organ", "abnormality")  # the second cell of a line in 2019's test file
SPLITS = (("test", TEST), ("train", TRAIN), ("val", VAL))  # text in names of files and folders, and its part
SLAKE_FILES = ((TRAIN, ("train.json",)), (VAL, ("validation.json", "validate.json")), (TEST, ("test.json",)))
# Names of files that are not read: of question generation, and 2019's questions once more, by category (c1_...).
OTHER_TASK = re.compile(r"^readme|^c\d_|vqg|generation")


@dataclass(kw_only=True)
class MedVQA(QuestionOptions):
    """Several data sets of questions: inputs image and text, targets [n, 2]: index of the answer, and 1 if closed.

    Args:
        sets: slake, vqa_rad, vqa_med_2019, vqa_med_2020 and vqa_med_2021, in the order of the clients.
        paths: The folder or zip of a data set by its name.  Data sets that are not in it are in data_dir/<name>.
    """

    sets: list[str]
    paths: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for key, names in (("sets", self.sets), ("paths", self.paths or {})):
            unknown = [name for name in names if name not in READERS]
            require(
                not unknown,
                f"dataset.{key} names {', '.join(unknown)}, but must name only {', '.join(READERS)}: "
                "remove or correct the others",
            )
        is_valid = 0 < len(self.sets) == len(set(self.sets))
        require(
            is_valid,
            f"dataset.sets={self.sets} must name at least one data set, and each once: list some of "
            f"{', '.join(READERS)}",
        )

    def load(self) -> Arrays:
        """Return the questions of the data sets in ``sets``, in this order.  Each data set is a natural client."""
        return rows_to_arrays(self.read(), self.sets, self, "dataset=med_vqa")

    def read(self) -> list[tuple[Files, list[Row]]]:
        """Return the files and the questions of each data set in ``sets``.

        The natural client of a question is the name of its data set.
        """
        rows = []
        for name in self.sets:
            title, where, read = READERS[name]  # name for messages, page for downloads, and function that reads Files
            files = Files(Path((self.paths or {}).get(name) or Path(self.data_dir) / name), title, where)
            rows.append((files, read(files)))
        return rows


def read_slake(files: Files) -> list[Row]:
    """Return a Row for each English question of SLAKE: training questions, then validation, then test questions."""
    rows = []
    for split, names in SLAKE_FILES:  # TRAIN, VAL or TEST, and the names that its file may have
        for row in files.json(*names):
            if files.value(row, "q_lang") == "en":
                image = files.find(f"imgs/{files.value(row, 'img_name')}")
                answer, answer_type = files.value(row, "answer"), files.value(row, "answer_type")
                rows.append(Row(image, files.value(row, "question"), (answer,), answer_type, split, source="slake"))
    return rows


def read_vqa_med(files: Files, year: int) -> list[Row]:
    """Return the questions of one year of VQA-Med.

    They are lines `picture|question|answer`, in files whose names contain the part, such as "train".
    Answers of a test part may be in another file, `picture|answer|another correct answer`.  Files of 2020 in the folder
    of 2021, except the test part, belong to 2021's training part.  Questions of 2021 are open; other types are inferred
    from the answer.

    Args:
        files: The files of the data set.
        year: 2019, 2020 or 2021.
    """
    # from the name without suffix to the path; reversed, so that the first path of equal names is used
    pictures = {Path(name).stem: name for name in reversed(files.names) if name.lower().endswith(PICTURES)}
    complete: dict[int, list[list[str]]] = {TRAIN: [], VAL: [], TEST: []}  # [picture, question, answers ...]
    unanswered: dict[int, list[list[str]]] = {TRAIN: [], VAL: [], TEST: []}  # [picture, question]
    answers: dict[int, dict[str, list[str]]] = {TRAIN: {}, VAL: {}, TEST: {}}  # by picture
    for name in files.names:
        lines = list(_lines(files, name)) if name.lower().endswith(".txt") else []
        split = _split(name, year) if lines else None
        if split is None:
            continue
        if sum(line[1].endswith("?") for line in lines) < len(lines) / 2:  # few questions: a file of answers
            answers[split] |= {line[0]: line[1:] for line in lines}
        elif max(map(len, lines)) == 2:
            unanswered[split] += lines
        else:
            complete[split] += lines
    for split, lines in unanswered.items():
        if not complete[split]:
            complete[split] = [[*line, *answers[split].get(line[0], ())] for line in lines]
    answer_type = "open" if year == 2021 else None
    rows = []
    for split, lines in complete.items():
        for image, question, *correct in lines:
            require(bool(correct), f"{files.key}: the question about {image} has no answer in any file: add the file")
            require(image in pictures, f"{files.key}: the picture {image} does not exist: copy it there")
            source = f"vqa_med_{year}"  # the natural client
            rows.append(Row(pictures[image], question, tuple(correct), answer_type, split, source))
    return rows


def _lines(files: Files, name: str) -> Iterator[list[str]]:
    """Yield the cells of each line of a file, without the category that 2019's test file has.

    Nothing is yielded for a file of another task, such as question generation.

    Args:
        files: The files of the data set.
        name: The relative path of the file.
    """
    if OTHER_TASK.search(name.split("/")[-1].lower()):
        return
    for line in files.text(name).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 1:
            has_category = cells[1] in CATEGORIES and len(cells) > 2  # such as "modality"
            yield [cells[0], *cells[2:]] if has_category else cells


def _split(name: str, year: int) -> int | None:
    """Return the part of a file's questions by its path.

    The name of the file is searched for "test", "train" or "val" first, then the innermost folder, and so on.

    Args:
        name: The relative path of the file.
        year: The year of VQA-Med.  Files of 2020 in its folder of 2021 are training data, except the test part.

    Returns:
        TRAIN, VAL or TEST.  None: the path names no part, or it is the test part of another year.
    """
    for part in reversed(name.lower().split("/")):
        # SPLITS: pairs of a word and its part, "test" first; "eval" is not the word "val"
        splits = [split for word, split in SPLITS if word in part.replace("eval", "")]
        # a name with several words, such as "train and val", does not tell the part, except that "test" counts
        if splits and (len(splits) == 1 or splits[0] == TEST):
            if year == 2021 and "2020" in name:
                return None if splits[0] == TEST else TRAIN
            return splits[0]
    return None


Reader = tuple[str, str, Callable[[Files], list[Row]]]  # title, where it is available, function
READERS: dict[str, Reader] = {
    "slake": ("SLAKE", "huggingface.co/datasets/BoKelvin/SLAKE (CC BY 4.0)", read_slake),
    "vqa_rad": ("VQA-RAD", vqa_rad.WHERE, partial(vqa_rad.read_rows, source="vqa_rad")),
    **{
        f"vqa_med_{year}": (f"VQA-Med {year}", IMAGECLEF, partial(read_vqa_med, year=year))
        for year in (2019, 2020, 2021)
    },
}
