"""Questions about medical pictures of several published data sets, each a natural silo: FedPIA's Task 1.

Sources: SLAKE (Liu et al., ISBI 2021; huggingface.co/datasets/BoKelvin/SLAKE), its English questions; VQA-Med 2019,
2020 and 2021 (Ben Abacha et al., ImageCLEF; zenodo.org/records/10499039, github.com/abachaa, and for 2020's training
part aicrowd.com); VQA-RAD (vqa_rad.py).
Licences: CC BY 4.0, VQA-RAD CC0.
Layout: folders or zips as published, below data_dir or where dataset.paths says::

    data_dir/slake/, vqa_rad/, vqa_med_2019/, vqa_med_2020/, vqa_med_2021/

Test parts are the official ones; those of FedPIA for 2020, 2021
and VQA-RAD have other sizes, by a rule that it does not tell.  Validation parts are not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from fedbench.core.options import Count, require
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.questions import vqa_rad
from fedbench.data.questions._answers import Answers, Kept, Normalizer
from fedbench.data.questions._question_files import PICTURES, Files, Layout, Row, assembled

IMAGECLEF = "zenodo.org/records/10499039, github.com/abachaa and aicrowd.com (CC BY 4.0)"
CATEGORIES = ("modality", "plane", "organ", "abnormality")  # which 2019's test file names between picture and question
SPLITS = (("test", TEST), ("train", TRAIN), ("val", VAL))
OTHER_TASK = re.compile(r"^readme|^c\d_|vqg|generation")  # also 2019's questions once more, by category


class MedVQA:
    """inputs image uint8 [m, 1 or 3, side, side], each stored once, and text int64 [n, tokens]; targets [n, 2]
    (data/questions/_questions.py).

    sets: slake, vqa_rad, vqa_med_2019, vqa_med_2020, vqa_med_2021, in the order of the clients.  paths: folders or zips
    of them; of others data_dir/<name>.  All else: see VQARad.
    """

    def __init__(
        self,
        sets: list[str],
        paths: dict[str, str] | None = None,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "rgb",
        tokens: Count = 24,
        vocab: str | None = None,
        min_count: Count = 1,
        answers: Kept = "all",
        normalizer: Normalizer = "plain",
        data_dir: str = "data",
    ):
        for key, names in (("sets", sets), ("paths", paths or {})):
            odd = [name for name in names if name not in READERS]
            require(not odd, f"dataset.{key} knows {', '.join(READERS)}, not {', '.join(odd)}")
        require(0 < len(sets) == len(set(sets)), f"dataset.sets={sets} must name one set or more, each once")
        self.sets = sets
        self.paths = {name: Path((paths or {}).get(name) or Path(data_dir) / name) for name in sets}
        self.layout = Layout(side, color, tokens, vocab, data_dir, Answers(min_count, answers, normalizer))

    def load(self) -> Arrays:
        """Set after set."""
        return assembled(self.read(), self.sets, self.layout, "dataset=med_vqa")

    def read(self) -> list[tuple[Files, list[Row]]]:
        """The rows of each set, whose name is their source."""
        read = []
        for name in self.sets:
            title, where, rows = READERS[name]
            files = Files(self.paths[name], title, where)
            read.append((files, rows(files)))
        return read


def slake(files: Files) -> list[Row]:
    """English questions; the validation file has two names in different releases."""
    parts = ((TRAIN, ("train.json",)), (VAL, ("validation.json", "validate.json")), (TEST, ("test.json",)))
    return [
        Row(
            files.find(f"imgs/{files.value(row, 'img_name')}"),
            files.value(row, "question"),
            (files.value(row, "answer"),),
            files.value(row, "answer_type"),
            split,
            "slake",
        )
        for split, names in parts
        for row in files.json(*names)
        if files.value(row, "q_lang") == "en"
    ]


def vqa_med(files: Files, year: int) -> list[Row]:
    """Lines `picture|question|answer`, in files that tell by their names which part they are.

    Answers of a test part may stand in a file of their own, `picture|answer|another right answer`.  What lies below
    2021's folder and says 2020, but for its test part, is 2021's training part.  closed: yes and no, nothing in 2021.
    """
    pictures = {Path(n).stem: n for n in reversed(files.names) if n.lower().endswith(PICTURES)}
    asked: dict[int, list[list[str]]] = {TRAIN: [], VAL: [], TEST: []}  # [picture, question, answers ...]
    unanswered: dict[int, list[list[str]]] = {TRAIN: [], VAL: [], TEST: []}
    answers: dict[int, dict[str, list[str]]] = {TRAIN: {}, VAL: {}, TEST: {}}
    for name in files.names:
        lines = list(_lines(files, name)) if name.lower().endswith(".txt") else []
        split = _split(name, year) if lines else None
        if split is None:
            continue
        if sum(line[1].endswith("?") for line in lines) < len(lines) / 2:
            answers[split] |= {line[0]: line[1:] for line in lines}
        else:
            (unanswered if max(map(len, lines)) == 2 else asked)[split] += lines
    for split, lines in unanswered.items():
        if not asked[split]:
            asked[split] = [[*line, *answers[split].get(line[0], ())] for line in lines]
    return [_row(files, pictures, line, split, year) for split, lines in asked.items() for line in lines]


def _lines(files: Files, name: str) -> Iterator[list[str]]:
    """The cells of a file's lines, without a category; nothing of a file that is about something else."""
    if OTHER_TASK.search(name.split("/")[-1].lower()):
        return
    for line in files.text(name).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 1:
            yield [cells[0], *cells[2:]] if cells[1] in CATEGORIES and len(cells) > 2 else cells


def _split(name: str, year: int) -> int | None:
    """The part that a file's name tells, or else a folder's; None where none does, or the part is not the year's."""
    for part in reversed(name.lower().split("/")):
        found = [split for word, split in SPLITS if word in part.replace("eval", "")]
        if found and (len(found) == 1 or found[0] == TEST):
            if year == 2021 and "2020" in name:
                return None if found[0] == TEST else TRAIN
            return found[0]
    return None


def _row(files: Files, pictures: dict[str, str], line: list[str], split: int, year: int) -> Row:
    image, question, *answers = line
    require(bool(answers), f"dataset.path={files.path}: the question about {image} has no answer in any file")
    require(image in pictures, f"dataset.path={files.path}: the picture {image} is not there")
    return Row(pictures[image], question, tuple(answers), "open" if year == 2021 else None, split, f"vqa_med_{year}")


Reader = tuple[str, str, Callable[[Files], list[Row]]]
READERS: dict[str, Reader] = {
    "slake": ("SLAKE", "huggingface.co/datasets/BoKelvin/SLAKE (CC BY 4.0)", slake),
    "vqa_rad": ("VQA-RAD", vqa_rad.WHERE, partial(vqa_rad.rows, source="vqa_rad")),
    **{f"vqa_med_{year}": (f"VQA-Med {year}", IMAGECLEF, partial(vqa_med, year=year)) for year in (2019, 2020, 2021)},
}
