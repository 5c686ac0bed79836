"""Labelled texts of a CSV file: tokens, masks, labels and clients; what is wrong in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language import bert_tokenizer
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, VAL
from fedbench.data.text.text_csv import TextCsv
from fedbench.simulation import build

TABLE = """\
note,label,ward,part
"to be, or",good,b,train
not,bad,a,test
to be or not to be,good,a,val
"""
COLUMNS: dict[str, str | None] = {"text": "note", "client": "ward", "split": "part"}


def written(folder: Path, text: str = TABLE) -> str:
    path = folder / "notes.csv"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_texts_labels_and_clients_by_hand(tmp_path: Path, file: str) -> None:
    """A long text is cut before its [SEP]; a folder and a file give the same tokens."""
    tokenizer = bert_tokenizer(tmp_path / "bert") / file
    arrays = TextCsv(written(tmp_path), str(tokenizer), length=6, columns=COLUMNS).load()
    inputs = arrays.parts()
    assert inputs["text"].tolist() == [[2, 4, 5, 8, 6, 3], [2, 7, 3, 0, 0, 0], [2, 4, 5, 6, 7, 3]]
    assert inputs["mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1] * 6]
    assert arrays.class_names == ["bad", "good"] and arrays.targets.tolist() == [1, 0, 1]
    assert arrays.domain_names == ["a", "b"] and arrays.domain is not None and arrays.domain.tolist() == [1, 0, 0]
    assert arrays.split.tolist() == [TRAIN, TEST, VAL] and arrays.task == "classification"


def test_characters_without_a_tokenizer(tmp_path: Path) -> None:
    text = "text,label\nab,x\nbcd,y\n"
    arrays = TextCsv(written(tmp_path, text), length=2).load()
    assert arrays.parts()["text"].tolist() == [[0, 1], [1, 2]] and arrays.domain is None
    longer = TextCsv(written(tmp_path, text), length=4, classes=["y", "x"]).load()
    assert longer.parts()["mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]] and longer.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    "text, options, words",
    [
        (TABLE, {"columns": {"text": "words"}}, r"has no column words; its columns are note, label, ward, part: set"),
        (TABLE, {"columns": {**COLUMNS, "ID": "x"}}, "dataset.columns has the keys ID, but only text, label, client"),
        (TABLE, {"columns": {"text": None}}, r"dataset.columns.text must not be null"),
        (TABLE.replace("not,bad", ",bad"), {"columns": COLUMNS}, "line 3: note is '', expected a value"),
        (TABLE.replace("bad", ""), {"columns": COLUMNS}, "line 3: label is '', expected a value"),
        (TABLE.replace("test", "exam"), {"columns": COLUMNS}, "part is 'exam', expected train, val or test"),
        (TABLE, {"columns": COLUMNS, "classes": ["good"]}, "has labels that are not in dataset.classes: bad"),
        (TABLE, {"columns": COLUMNS, "classes": ["good", "good"]}, "dataset.classes must be distinct"),
        (TABLE, {"columns": COLUMNS, "delimiter": "::"}, "dataset.delimiter='::' is not one character"),
        (TABLE.replace("bad", "good"), {"columns": COLUMNS}, "needs at least 2 classes"),
        (TABLE, {"columns": COLUMNS, "tokenizer": "gone"}, "dataset.tokenizer=gone does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        TextCsv(written(tmp_path, text), **options).load()
    assert "\n" not in str(error.value)


def test_clients_are_those_of_the_column(tmp_path: Path) -> None:
    rows = "".join(f"text {i} of {i % 3},{i % 2},w{i % 3}\n" for i in range(60))
    path = written(tmp_path, "text,label,ward\n" + rows)
    cfg = compose(["dataset=text_csv", f"dataset.path={path}", "dataset.columns.client=ward", "partition=domain"])
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    assert split.num_clients == 3 and split.names == ("w0", "w1", "w2")
    for client in range(3):
        assert (arrays.domain[split.train[client]] == client).all() and len(split.test[client])
    assert np.unique(arrays.parts()["mask"]).tolist() == [0, 1]
