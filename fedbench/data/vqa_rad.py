"""VQA-RAD: clinicians' questions about radiographs of head, chest and abdomen.

Lau et al., Scientific Data 2018 (osf.io/89kps, CC0): 3,064 training and 451 test questions about 315 pictures, in
trainset.json, testset.json and images/.  An organ is a natural silo.  All 203 test pictures occur in training too: the
published split measures answers to new questions, not to new patients.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, require
from fedbench.data._images import fill, open_picture
from fedbench.data._questions import Question, arrays_of, by_words, is_closed, normalized, vocabulary
from fedbench.data.base import TEST, TRAIN, Arrays

ORGANS = ("HEAD", "CHEST", "ABD")
FILES = {TRAIN: "trainset.json", TEST: "testset.json"}


class VQARad:
    """inputs image uint8 [m, 1 or 3, side, side], each stored once, and text int64 [n, tokens]; targets [n, 2]
    (data/_questions.py).

    path: the folder, or a zip of it; null: data_dir/vqa_rad.  side: pixels; color: rgb or grey.  tokens: of a question,
    the ends included.  vocab: null for the words of the training questions, or a vocab.txt of WordPiece (a folder's
    name is enough).
    """

    def __init__(
        self,
        path: str | None = None,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "grey",
        tokens: Count = 24,
        vocab: str | None = None,
        data_dir: str = "data",
    ):
        self.path, self.side, self.color, self.tokens, self.vocab = path, side, color, tokens, vocab
        self.data_dir = data_dir

    def load(self) -> Arrays:
        """Training questions first, as published."""
        source = _Source(Path(self.path or Path(self.data_dir) / "vqa_rad"))
        rows = [(split, row) for split, name in FILES.items() for row in source.json(name)]
        names = sorted({str(row["image_name"]) for _, row in rows})
        place = {name: i for i, name in enumerate(names)}
        questions = [
            Question(
                place[str(row["image_name"])],
                str(row["question"]),
                answer := normalized(row["answer"]),
                is_closed(answer, str(row["answer_type"])),
                split,
                ORGANS.index(str(row["image_organ"]).strip()),
            )
            for split, row in rows
        ]
        decoded = (open_picture(source.file(f"images/{name}"), self.side, self.color) for name in names)
        pictures = fill(decoded, len(names), (3 if self.color == "rgb" else 1, self.side, self.side))
        return arrays_of(questions, pictures, self._tokens(questions), [o.lower() for o in ORGANS], "dataset=vqa_rad")

    def _tokens(self, questions: list[Question]) -> Any:
        if self.vocab is None:
            known = vocabulary([q.question for q in questions if q.split == TRAIN])
            return lambda texts: by_words(texts, known, self.tokens)
        from fedbench.data._wordpiece import tokenize

        file = Path(self.vocab)
        return lambda texts: np.asarray(
            tokenize(list(texts), file / "vocab.txt" if file.is_dir() else file, self.tokens)
        )


class _Source:
    """A folder or a zip of it."""

    def __init__(self, path: Path):
        require(path.exists(), f"dataset.path={path}: VQA-RAD is not there; it is at osf.io/89kps (CC0)")
        self.path, self.zip = path, zipfile.ZipFile(path) if path.is_file() else None

    def json(self, name: str) -> list[dict[str, Any]]:
        """A file of rows."""
        try:
            file = self.file(name)
            text = file.read_text(encoding="utf-8") if isinstance(file, Path) else file.read().decode("utf-8")
            return json.loads(text)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"dataset.path={self.path}: {name} cannot be read ({error})") from error

    def file(self, name: str) -> Path | io.BytesIO:
        """A file, to be opened."""
        return self.path / name if self.zip is None else io.BytesIO(self.zip.read(name))
