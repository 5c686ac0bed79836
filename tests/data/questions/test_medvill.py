"""MedViLL's pairs in a generated folder: labels, the cut, and division by the rarest label."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions.medvill import LABELS, MedViLL, num_train
from fedbench.partition.base import build_split
from fedbench.partition.dirichlet import Dirichlet
from fedbench.partition.dirichlet_rarest import DirichletRarest
from fedbench.simulation import simulator

SAID = ("'No Finding'", "''", "'Edema', 'Support Devices'", '"Fracture"', "Edema,Pneumonia", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """48 pairs; pictures lie where the paths say, but for their first two folders."""
    number = 0
    for name, count in (("Train", 36), ("Valid", 6), ("Test", 6)):
        rows = []
        for _ in range(count):
            part = name.lower()
            row = {"id": str(number), "label": SAID[number % 6], "text": f"Clear lungs, {number}."}
            rows.append(row | {"img": f"data/preprocessed/openi/{part}/{number}.jpg"})
            path = tmp_path / "pairs" / "openi" / part / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9, 9), 5 * number, np.uint8)).save(path)
            number += 1
        (tmp_path / "pairs" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs"


def test_labels_and_cut(folder: Path) -> None:
    """Nothing said is Others; floor(0.8 n) of all pairs are trained on, others with another seed."""
    made = MedViLL(path=str(folder), side=8, tokens=6).load()
    assert made.num_classes == 15 and made.class_names == list(LABELS) and made.class_names[7] == "Others"
    names = [{LABELS[c] for c in np.flatnonzero(row)} for row in made.targets[:6]]
    assert names == [
        *({"No Finding"}, {"Others"}, {"Edema", "Support Devices"}, {"Fracture"}, {"Edema", "Pneumonia"}, {"Others"})
    ]
    assert (made.split == TRAIN).sum() == int(0.8 * 48) and (made.split == TEST).sum() == 10
    assert made.input_shape == {"image": (1, 8, 8), "text": (6,)}
    pictures = made.parts()["image"]
    assert [abs(int(p.mean()) - 5 * i) < 3 for i, p in enumerate(pictures)] == [True] * 48
    again, other = (MedViLL(path=str(folder), side=8, tokens=6, seed=seed).load() for seed in (0, 1))
    assert made.digest == again.digest and (made.split != other.split).any()


def test_fedpias_sizes() -> None:
    """80% of MedViLL's 3,547 and 91,685 pairs are the paper's 2,837 and 73,348."""
    assert [num_train(n, 0.2) for n in (3547, 91685)] == [2837, 73348]


def test_a_run(folder: Path, tmp_path: Path) -> None:
    words = "dataset=medvill dataset.side=16 dataset.tokens=8 task.micro_f1=true partition=dirichlet_rarest "
    plan = "partition.num_clients=2 partition.min_size=4 model=vilt_tiny algorithm=fedavg rounds=1 hardware=cpu"
    cfg = compose([*(words + plan).split(), f"dataset.path={folder}"])
    check(cfg)
    (tmp_path / "run").mkdir()
    summary = simulator.run(cfg, tmp_path / "run")
    assert 0 <= summary["last"]["personal/micro_f1"] <= 1


def test_mistakes_are_one_sentence(folder: Path) -> None:
    row = {"id": "1", "text": "", "label": "'Cough'", "img": "openi/test/47.jpg"}
    (folder / "Test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="the labels Cough are not among Support Devices"):
        MedViLL(path=str(folder), side=8).load()
    (folder / "Test.jsonl").write_text(json.dumps(row) + "\n{")
    with pytest.raises(ConfigError, match=r"Test\.jsonl, line 2 must be a JSON dict"):
        MedViLL(path=str(folder), side=8).load()


# -- the rarest label ------------------------------------------------------------------------------------
def several(targets: np.ndarray, split: np.ndarray) -> Arrays:
    return Arrays(np.zeros((len(targets), 1), np.float32), targets, split, targets.shape[1], task="multilabel")


def test_the_rarest_label_by_hand() -> None:
    """In training label 0 occurs three times, 1 twice, 2 and 3 once; test samples are not counted; a tie goes to the
    first in the list."""
    rows = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    split = np.array([TRAIN] * 4 + [TEST] * 3, np.int8)
    labels = DirichletRarest().labels(several(np.array(rows, np.float32), split))
    assert labels.tolist() == [1, 1, 2, 4, 1, 1, 2]


def test_samples_of_one_label_are_divided_as_ever() -> None:
    rng = np.random.default_rng(0)
    x, y = np.zeros((300, 1), np.float32), rng.integers(0, 5, 300)
    arrays = Arrays(x, y, np.zeros(300, np.int8), 5)
    same = [build_split(arrays, kind(0.5), 4, 0).hash for kind in (Dirichlet, DirichletRarest)]
    assert same[0] == same[1]


def test_the_rare_label_is_what_is_skewed() -> None:
    """Everybody has label 0 and a tenth label 1 too: by the first label all would be alike; by the rarest they are not,
    and test parts have the same shares."""
    targets = np.zeros((4000, 2), np.float32)
    targets[:, 0], targets[::10, 1] = 1, 1
    split = (np.arange(4000) // 10 % 4 == 0).astype(np.int8) * TEST
    arrays = several(targets, split)
    cut = build_split(arrays, DirichletRarest(0.1, min_size=5, cap=False), 4, 0, "published")
    of = {
        part: np.array([targets[lists[i], 1].sum() for i in range(4)])
        for part, lists in (("train", cut.train), ("test", cut.test))
    }
    assert of["train"].sum() == 300 and of["train"].max() > 150
    np.testing.assert_allclose(of["train"] / 300, of["test"] / 100, atol=0.02)
