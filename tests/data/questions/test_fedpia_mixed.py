"""FedPIA's Task 5 in generated folders: each set is what its own reader makes of it, and all are trained together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions import _question_files
from fedbench.data.questions.fedpia_mixed import FedPIAMixed
from fedbench.data.questions.med_vqa import MedVQA
from fedbench.data.questions.medvill import LABELS, MedViLL
from fedbench.partition.base import build_split
from fedbench.partition.domain import Domain
from fedbench.simulation import simulator

SAID = ("'No Finding'", "'Edema', 'Support Devices', 'Fracture'", "", "Pneumonia")
OPTIONS: dict[str, Any] = {"side": 8, "color": "grey", "tokens": 6}


def picture(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9), level, np.uint8)).save(path)


def make_slake(root: Path) -> None:
    parts = {
        "train.json": [(0, "Is it healthy?", "No", "CLOSED"), (0, "Which organ?", "Lung", "OPEN")],
        "validation.json": [],
        "test.json": [(1, "Which organ?", "Liver", "OPEN"), (1, "Is it healthy?", "No", "CLOSED")],
    }
    keys = ("img_name", "question", "answer", "answer_type", "q_lang")
    for name, rows in parts.items():
        picture(root / "imgs" / "xmlab0" / "source.jpg", 20)
        picture(root / "imgs" / "xmlab1" / "source.jpg", 40)
        named = [dict(zip(keys, (f"xmlab{i}/source.jpg", *rest, "en"))) for i, *rest in rows]
        (root / name).write_text(json.dumps(named))


def make_vqa_rad(root: Path) -> None:
    row = {"image_name": "a.jpg", "image_organ": "HEAD", "question": "What is it?", "answer_type": "OPEN"}
    picture(root / "images" / "a.jpg", 60)
    (root / "trainset.json").write_text(json.dumps([row | {"answer": answer} for answer in ("cyst", "mass", "clot")]))
    (root / "testset.json").write_text(json.dumps([row | {"answer": "mass"}]))


def make_pairs(root: Path, count: int, level: int) -> None:
    rows = []
    for i in range(count):
        rows.append({"id": i, "label": SAID[i % 4], "text": f"Clear lungs, {i}.", "img": f"openi/{i}.jpg"})
        picture(root / "openi" / f"{i}.jpg", level + i)
    for name, some in (("Train", rows[:-2]), ("Valid", rows[-2:-1]), ("Test", rows[-1:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """SLAKE, VQA-RAD, and pairs of two hospitals."""
    make_slake(tmp_path / "slake")
    make_vqa_rad(tmp_path / "vqa_rad")
    make_pairs(tmp_path / "open_i", 10, 100)
    make_pairs(tmp_path / "mimic_cxr", 20, 120)
    return tmp_path


def load(root: Path, **options: Any) -> Arrays:
    labelled = {"open_i": None, "mimic_cxr": 10}
    return FedPIAMixed(sets=["slake", "vqa_rad"], labelled=labelled, data_dir=str(root), **OPTIONS, **options).load()


def shown(arrays: Arrays, which: np.ndarray) -> np.ndarray:
    """The pictures of some samples."""
    entry = np.arange(len(arrays)) if arrays.shared is None else arrays.shared["image"]
    return arrays.parts()["image"][entry[which]]


def test_each_set_is_what_its_reader_makes_of_it(folders: Path) -> None:
    made = load(folders)
    assert made.domain is not None and made.class_mask is not None
    assert made.domain_names == ["slake", "vqa_rad", "open_i", "mimic_cxr"]
    assert made.class_mask.sum(1).tolist() == [2, 3, 15, 15]
    asked = MedVQA(sets=["slake", "vqa_rad"], data_dir=str(folders), **OPTIONS).load()
    mine = made.domain < 2
    np.testing.assert_array_equal(
        made.targets[mine][:, :2], np.stack([1 + asked.targets[:, 1], asked.targets[:, 0]], 1)
    )
    assert (made.targets[mine][:, 2:] == -1).all() and made.split[mine].tolist() == asked.split.tolist()
    np.testing.assert_array_equal(shown(made, mine), shown(asked, np.full(len(asked), True)))
    told = MedViLL(path=str(folders / "open_i"), **OPTIONS).load()
    mine = made.domain == 2
    hot = np.zeros((10, len(LABELS) + 1), np.float32)
    np.put_along_axis(hot, made.targets[mine][:, 1:], 1, 1)  # -1 is the last one
    np.testing.assert_array_equal(hot[:, :-1], told.targets)
    assert made.split[mine].tolist() == told.split.tolist() and not made.targets[mine][:, 0].any()
    np.testing.assert_array_equal(shown(made, mine), told.parts()["image"])


def test_some_pairs_are_drawn_before_the_cut(folders: Path) -> None:
    """Half of MIMIC-CXR's, of which 80% are trained on; the texts of all share their words."""
    made = load(folders)
    assert made.domain is not None
    mine = made.domain == 3
    assert mine.sum() == 10 and (made.split[mine] == TRAIN).sum() == 8 and (made.split[mine] == TEST).sum() == 2
    pictures = shown(made, mine)
    assert len({int(p.mean()) for p in pictures}) == 10 and pictures.mean() > 120
    words = [set(made.parts()["text"][made.domain == i, 1]) for i in (2, 3)]
    assert words[0] == words[1] and len(words[0]) == 1  # clear
    split = build_split(made, Domain(), None, 0, "published")
    assert [part.sizes.tolist() for part in (split.train, split.test)] == [[2, 3, 8, 8], [2, 1, 2, 2]]


def test_pictures_of_all_are_decoded_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(folders)
    monkeypatch.setattr(_question_files, "MAX_IN_MEMORY", 1)
    for _ in range(2):
        assert load(folders).digest == made.digest
        monkeypatch.setattr(_question_files, "decode", None)
    assert len(list((folders / "cache").glob("fedpia_mixed-*.npy"))) == 1


def test_a_run(folders: Path, tmp_path: Path) -> None:
    words = "dataset=fedpia_mixed dataset.sets=[slake,vqa_rad] dataset.side=16 dataset.color=grey dataset.tokens=8 "
    words += "dataset.labelled.mimic_cxr=10 partition=domain model=vilt_tiny adapter=houlsby algorithm=fedpia rounds=1 "
    cfg = compose([*(words + "sample_rate=1 hardware=cpu").split(), f"data_dir={folders}"])
    check(cfg)
    (tmp_path / "run").mkdir()
    last = simulator.run(cfg, tmp_path / "run")["last"]
    assert last["personal/ceiling"] == pytest.approx((1 / 2 + 1) / 2)  # of the two that are asked
    assert 0 <= last["personal/micro_f1"] <= 1 and 0 <= last["personal/sample_f1"] <= 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"labelled": {}}, r"dataset\.labelled is empty, but must name at least one data set"),
        ({"labelled": {"slake": None}}, r"dataset\.labelled and dataset\.sets both name slake"),
        ({"labelled": {"open_i": 1}}, r"dataset\.labelled has fewer than 2 pairs for open_i"),
        ({"paths": {"mimic": "x"}}, r"dataset\.paths names mimic, but .*: slake, open_i"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FedPIAMixed(**{"sets": ["slake"], "labelled": {"open_i": None}, **options})


def test_what_is_missing(folders: Path) -> None:
    with pytest.raises(
        ConfigError, match="nowhere: this folder or zip of MedViLL's pairs does not exist; download it from github"
    ):
        load(folders, paths={"mimic_cxr": "nowhere"})
