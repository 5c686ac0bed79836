"""Tables of pictures with several labels, and pictures in several folders: NIH ChestX-ray14's and ISIC's layouts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from silo_files import picture, write_csv
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash
from fedbench.data.base import Arrays
from fedbench.data.images.image_table import ImageTable
from fedbench.simulation import build

FINDINGS = ["Cardiomegaly", "Cardiomegaly|Emphysema", "No Finding", "Emphysema|Hernia", "No Finding", "Effusion"]
NIH = {"image": "Image Index", "label": "Finding Labels", "patient": "Patient ID", "silo": None}


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """Data_Entry_2017.csv beside images_001/images to images_003/images."""
    rows = []
    for i, findings in enumerate(FINDINGS):
        name = f"{i // 2 + 1:08}_{i % 2:03}.png"
        picture(tmp_path / f"images_{i // 2 + 1:03}" / "images" / name, 10 * i)
        rows.append({"Image Index": name, "Finding Labels": findings, "Follow-up #": i % 2, "Patient ID": i // 2 + 1})
    return write_csv(tmp_path / "Data_Entry_2017.csv", rows)


def load(path: Path, **options: Any) -> Arrays:
    return ImageTable(str(path.parent / "data"), str(path), **{"resize": 8, "columns": NIH, **options}).load()


def sentence(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        load(path, **options)
    return str(refusal.value)


def test_nihs_files_as_they_are_unpacked(nih: Path) -> None:
    arrays = load(nih, label_separator="|")
    assert arrays.class_names == ["Cardiomegaly", "Effusion", "Emphysema", "Hernia", "No Finding"]
    assert arrays.task == "multilabel" and arrays.targets.dtype == np.float32
    wanted = [[1, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]
    assert arrays.targets.tolist() == wanted
    assert arrays.inputs[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]  # type: ignore[index]
    assert arrays.subject is not None and arrays.subject.tolist() == [0, 0, 1, 1, 2, 2]


def test_classes_choose_labels(nih: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedbench.data"):
        arrays = load(nih, label_separator="|", classes=["Emphysema", "Cardiomegaly", "Mass"])
    assert arrays.targets.tolist() == [[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert "are ignored: Effusion (1), Hernia (1), No Finding (2)" in caplog.text
    assert "no picture has the label Mass" in caplog.text
    assert "has no label of dataset.classes" in sentence(nih, label_separator="|", classes=["Mass"])


def test_blanks_and_empty_cells_of_lists(tmp_path: Path) -> None:
    cells = ["a; b", "", "b ;", "a"]
    for i in range(len(cells)):
        picture(tmp_path / f"{i}.png", i)
    path = write_csv(tmp_path / "t.csv", [{"image": f"{i}.png", "label": cell} for i, cell in enumerate(cells)])
    arrays = load(path, columns={"patient": None, "silo": None}, label_separator=";")
    assert arrays.class_names == ["a", "b"] and arrays.targets.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]]


def test_labels_of_lists_are_spelled_in_one_way(nih: Path) -> None:
    nih.write_text(nih.read_text().replace("Emphysema|Hernia", "emphysema|Hernia"))
    assert "differ only by case or blanks" in sentence(nih, label_separator="|")
    nih.write_text(nih.read_text().replace("emphysema|Hernia", "1|Hernia").replace("No Finding", "1.0"))
    assert "are equal numbers" in sentence(nih, label_separator="|")
    assert "dataset.columns.label" in sentence(nih, columns=NIH | {"label": ["Follow-up #", "Follow-up #"]})


def test_lists_without_a_separator_are_refused(nih: Path, tmp_path: Path) -> None:
    words = "has the label Cardiomegaly|Emphysema, a list of labels: set dataset.label_separator='|' to read"
    assert words in sentence(nih)
    arrays = load(nih, classes=sorted(set(FINDINGS)))  # named, each is a class
    assert arrays.task == "classification" and arrays.num_classes == 5
    for labels, is_list in (("a b a,b", True), ("a b c,d", False), ("a b a;b", True)):
        rows = [{"image": f"images_001/images/0000000{1}_00{i}.png", "label": v} for i, v in enumerate(labels.split())]
        picture(tmp_path / rows[2]["image"], 1)
        path = write_csv(tmp_path / "t.csv", rows)
        if is_list:
            assert "a list of labels" in sentence(path, columns={"patient": None, "silo": None})
        else:
            assert load(path, columns={"patient": None, "silo": None}).num_classes == 3


@pytest.mark.parametrize(
    ("rows", "task", "targets"),
    [
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1)], "classification", [0, 1, 2]),
        ([("1.0", "0.0", "0.0"), ("0.0", "1.0", "0.0"), ("0.0", "0.0", "1.0")], "classification", [0, 1, 2]),
        ([(1, 1, 0), (0, 0, 0), (0, "True", "false")], "multilabel", [[1, 1, 0], [0, 0, 0], [0, 1, 0]]),
    ],
)
def test_a_column_for_each_class(tmp_path: Path, rows: list[tuple], task: str, targets: list) -> None:
    """ISIC's ground truth: image, MEL, NV, BCC ..."""
    names = ["MEL", "NV", "BCC"]
    for i in range(len(rows)):
        picture(tmp_path / f"ISIC_{i}.png", i)
    listed = [{"image": f"ISIC_{i}", **dict(zip(names, row, strict=True))} for i, row in enumerate(rows)]
    path = write_csv(tmp_path / "t.csv", listed)
    columns = {"image": "{image}.png", "label": names, "patient": None, "silo": None}
    arrays = load(path, columns=columns)
    assert (arrays.task, arrays.targets.tolist(), arrays.class_names) == (task, targets, names)
    listed[1]["NV"] = -1
    write_csv(path, listed)
    assert "column NV contains -1, expected 0 or 1" in sentence(path, columns=columns)
    listed[1]["NV"] = ""
    write_csv(path, listed)
    assert "t.csv, line 3: NV is empty" in sentence(path, columns=columns)
    assert "no column AK" in sentence(path, columns=columns | {"label": [*names, "AK"]})


def test_what_does_not_go_together(nih: Path) -> None:
    assert "dataset.negatives needs one label for each picture" in sentence(nih, label_separator="|", negatives=[1])
    assert "dataset.columns.image=['a', 'b'] must be one column" in sentence(nih, columns=NIH | {"image": ["a", "b"]})
    assert "names the classes" in sentence(nih, columns=NIH | {"label": ["Follow-up #"]}, classes=["a"])
    assert "set it to the text between two labels" in sentence(nih, label_separator="")


def test_a_picture_is_looked_for_in_the_folders_below(nih: Path) -> None:
    root = nih.parent
    picture(root / ".ipynb_checkpoints" / "00000001_000.png", 0)
    assert load(nih, label_separator="|").inputs[0, 0, 0, 0] == 0  # type: ignore[index]
    picture(root / "images_002" / "images" / "00000001_000.png", 0)
    assert "lists 00000001_000.png, which exists twice: " in sentence(nih, label_separator="|")
    (root / "images_002" / "images" / "00000001_000.png").unlink()
    (root / "images_001" / "images" / "00000001_000.png").unlink()
    assert "1 of the 6 pictures that" in sentence(nih, label_separator="|")


def test_a_run_from_the_command(nih: Path) -> None:
    """What is typed reaches the reader, and the task is that of several labels."""
    cfg = compose(
        [
            *("dataset=image_table", f"dataset.path={nih}", "dataset.resize=8", "partition=iid", "model=logistic"),
            *("partition.num_clients=2", 'dataset.label_separator="|"', "dataset.columns.silo=null"),
            *("dataset.columns.image=Image Index", "dataset.columns.label=Finding Labels"),
            *("dataset.columns.patient=Patient ID", f"data_dir={nih.parent / 'data'}"),
        ]
    )
    assert build.data(cfg).task == "multilabel"
    cfg = compose(["dataset=image_table", "dataset.path=t.csv", "dataset.columns.label=[MEL,NV]"])
    assert list(cfg.dataset.columns.label) == ["MEL", "NV"]


def test_old_runs_keep_their_hash() -> None:
    cfg = compose(["dataset=image_table", "dataset.path=t.csv"])
    before = config_hash(cfg)
    del cfg.dataset.label_separator
    assert config_hash(cfg) == before
