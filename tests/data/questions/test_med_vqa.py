"""SLAKE and VQA-Med: generated folders in their published layouts, alone and one a client."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, VAL, Arrays
from fedbench.data.questions import _question_files
from fedbench.data.questions.med_vqa import READERS, MedVQA
from fedbench.partition.base import build_split
from fedbench.partition.domain import Domain
from fedbench.simulation import simulator


def picture(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 10, 3), level, np.uint8)).save(path)


def lines(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def make_slake(root: Path, validation: str = "validation.json") -> Path:
    def row(image: int, question: str, answer: str, kind: str, language: str = "en") -> dict[str, object]:
        name = f"xmlab{image}/source.jpg"
        return {"img_name": name, "question": question, "answer": answer, "answer_type": kind, "q_lang": language}

    for i in range(3):
        picture(root / "Slake1.0" / "imgs" / f"xmlab{i}" / "source.jpg", 50 * i)
    parts = {
        "train.json": [
            row(0, "Is it healthy?", "No", "CLOSED"),
            row(0, "Which organ is it?", "Lung", "OPEN"),
            row(1, "Left or right lung?", "Left", "CLOSED "),
            row(1, "这是什么?", "肺", "OPEN", "zh"),
        ],
        validation: [row(2, "Which organ is it?", "Liver", "OPEN")],
        "test.json": [row(2, "Which organ is it?", "Lung.", "OPEN"), row(2, "Is it healthy?", "Yes", "CLOSED")],
    }
    for name, rows in parts.items():
        (root / "Slake1.0" / name).write_text(json.dumps(rows), encoding="utf-8")
    return root


def make_2019(root: Path) -> Path:
    train, val, test = (root / f for f in ("ImageClef-2019-VQA-Med-Training", "ImageClef-2019-Validation", "Test2019"))
    lines(train / "All_QA_Pairs_train.txt", "s1|is this a ct scan?|yes", "s1|what plane is this film|axial")
    lines(train / "QAPairsByCategory" / "C1_Modality_train.txt", "s1|is this a ct scan?|yes")
    lines(train / "train_ImageIDs.txt", "s1")
    lines(val / "All_QA_Pairs_val.txt", "s2|is this a ct scan?|no")
    lines(test / "VQAMed2019_Test_Questions.txt", "s3|is this a ct scan?", "s3|what is wrong?", "s3|what plane is this")
    lines(
        test / "VQAMed2019_Test_Questions_w_Ref_Answers.txt",
        *("s3|modality|is this a ct scan?|yes", "s3|abnormality|what is wrong?|cyst", "s3|plane|what plane is this|ap"),
    )
    lines(test / "README-VQA-Med-2019-TestSet.txt", "a|b|c")
    for i, folder in enumerate((train / "Train_images", val / "Val_images", test / "VQAMed2019_Test_Images")):
        picture(folder / f"s{i + 1}.jpg", 60 * i)
    return root


def make_2020(root: Path, test: bool = True) -> Path:
    both = root / "VQA-Med-2020-Task1-VQAnswering-TrainVal-Sets"
    train = both / "VQAMed2020-VQAnswering-TrainingSet"
    val = both / "VQAMed2020-VQAnswering-ValidationSet"
    lines(train / "VQAnswering_2020_Train_QA_pairs.txt", "t1|what is it?|cyst", "t2|is it normal?|no")
    lines(val / "VQAnswering_2020_Val_QA_Pairs.txt", "t3|what is it?|mass")
    for i, name in enumerate(("t1", "t2")):
        picture(train / "VQAnswering_2020_Train_images" / f"{name}.jpg", 40 * i)
    picture(val / "VQAnswering_2020_Val_images" / "t3.jpg", 90)
    if test:
        base = root / "VQAMed2020-Task1-VQAnswering-Test"
        lines(Path(f"{base}-Questions.txt"), "t4|what is it?", "t4|is it normal?", "t5|what is it?")
        lines(Path(f"{base}-ReferenceAnswers.txt"), "t4|Cyst", "t5|meningioma")
        for name in ("t4", "t5"):
            picture(root / "Images" / f"{name}.jpg", 200)
    return root


def make_2021(root: Path) -> Path:
    make_2020(root / "2020")
    lines(root / "VQA-Med-2021-VQAnswering-Task1-New-ValidationSet.txt", "v1|what is it?|lump")
    lines(root / "Task1-VQA-2021-TestSet-Questions.txt", "w1|what is it?", "w2|is it normal?")
    lines(root / "Task1-VQAnswering2021-Test-ReferenceAnswers.txt", "w1|tumour|mass|lump", "w2|no")
    lines(root / "Task2-VQGeneration2021-Test-ReferenceQuestions_vqg.txt", "w1|where is it?|what is it?")
    for name in ("v1", "w1", "w2"):
        picture(root / "images" / f"{name}.jpg", 10)
    return root


def load(name: str, path: Path) -> Arrays:
    return MedVQA(sets=[name], paths={name: str(path)}, side=8, tokens=8).load()


def test_slake(tmp_path: Path) -> None:
    """English alone; types as published, with blanks; an answer of validation is no answer to learn."""
    made = load("slake", make_slake(tmp_path / "a"))
    assert made.split.tolist() == [TRAIN] * 3 + [VAL] + [TEST] * 2
    assert made.targets.tolist() == [[2, 1], [1, 0], [0, 1], [-1, 0], [1, 0], [-1, 1]]  # left, lung, no
    assert len(made.parts()["image"]) == 3 and made.domain_names == ["slake"]
    old = make_slake(tmp_path / "b", "validate.json")
    assert load("slake", old).digest == made.digest
    zipped = shutil.make_archive(str(tmp_path / "slake"), "zip", old)
    assert load("slake", Path(zipped)).digest == made.digest


def test_vqa_med_2019(tmp_path: Path) -> None:
    """Questions once, not by category too; the test file with answers, not the one without."""
    made = load("vqa_med_2019", make_2019(tmp_path))
    assert made.split.tolist() == [TRAIN] * 2 + [VAL] + [TEST] * 3
    assert made.targets.tolist() == [[1, 1], [0, 0], [-1, 1], [1, 1], [-1, 0], [-1, 0]]  # axial, yes
    assert made.shared is not None and made.shared["image"].tolist() == [0, 0, 1, 2, 2, 2]


def test_vqa_med_2020(tmp_path: Path) -> None:
    """Test answers stand in a file of their own."""
    made = load("vqa_med_2020", make_2020(tmp_path))
    assert made.split.tolist() == [TRAIN] * 2 + [VAL] + [TEST] * 3
    assert made.targets.tolist() == [[0, 0], [1, 1], [-1, 0], [0, 0], [0, 0], [-1, 0]]  # cyst, no


def test_vqa_med_2021(tmp_path: Path) -> None:
    """2020's training and validation parts are its training part; of several right answers a known one; all open."""
    made = load("vqa_med_2021", make_2021(tmp_path))
    assert made.split.tolist() == [TRAIN] * 3 + [VAL] + [TEST] * 2
    assert made.targets.tolist() == [[0, 0], [2, 0], [1, 0], [-1, 0], [1, 0], [2, 0]]  # cyst, mass, no
    without = make_2021(tmp_path / "without")
    shutil.rmtree(without / "2020")
    with pytest.raises(ConfigError, match="there are no training questions of vqa_med_2021"):
        load("vqa_med_2021", without)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    make_slake(tmp_path / "slake")
    make_2019(tmp_path / "vqa_med_2019")
    make_2020(tmp_path / "vqa_med_2020")
    return tmp_path


def test_several_sets_are_clients(several: Path) -> None:
    """Answers of each are as they are alone; pictures follow one another."""
    sets = ["vqa_med_2020", "slake"]
    made = MedVQA(sets=sets, side=8, tokens=8, data_dir=str(several)).load()
    alone = [load(name, several / name) for name in sets]
    assert made.domain_names == sets and made.domain is not None and made.shared is not None
    for i, one in enumerate(alone):
        mine = made.domain == i
        np.testing.assert_array_equal(made.targets[mine], one.targets)
        assert one.shared is not None
        pictures = made.parts()["image"][made.shared["image"][mine]]
        np.testing.assert_array_equal(pictures, one.parts()["image"][one.shared["image"]])
    assert made.class_mask is not None and made.class_mask.tolist() == [[True, True, False], [True] * 3]
    split = build_split(made, Domain(), None, 0, "published")
    assert [p.sizes.tolist() for p in (split.train, split.val, split.test)] == [[2, 3], [1, 1], [3, 2]]


def test_many_pictures_are_decoded_once(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed file is decoded again."""
    small = MedVQA(sets=["slake"], side=8, data_dir=str(several)).load().parts()["image"]
    monkeypatch.setattr(_question_files, "MAX_IN_MEMORY", 1)

    def kept() -> np.ndarray:
        return MedVQA(sets=["slake"], side=8, data_dir=str(several)).load().parts()["image"]

    np.testing.assert_array_equal(kept(), small)
    assert len(list((several / "cache").glob("med_vqa-*.npy"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr(_question_files, "decode", None)
        np.testing.assert_array_equal(kept(), small)
    picture(several / "slake" / "Slake1.0" / "imgs" / "xmlab0" / "source.jpg", 255)
    assert kept()[0].mean() > 250


def test_a_run(several: Path, tmp_path: Path) -> None:
    """Three sets, one a client, of which one has no validation part."""
    slake = several / "slake" / "Slake1.0" / "validation.json"
    slake.write_text("[]")
    words = "dataset=med_vqa dataset.sets=[slake,vqa_med_2019,vqa_med_2020] dataset.side=16 dataset.color=grey "
    plan = "dataset.tokens=8 partition=domain model=vilt_tiny algorithm=fedavg rounds=1 sample_rate=1 hardware=cpu"
    cfg = compose([*(words + plan).split(), f"data_dir={several}"])
    check(cfg)
    (tmp_path / "run").mkdir()
    summary = simulator.run(cfg, tmp_path / "run")
    assert summary["last"]["personal/ceiling"] == pytest.approx((1 / 2 + 1 / 3 + 2 / 3) / 3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sets": ["slake", "pubmed"]}, "dataset.sets names pubmed, but must name only slake"),
        ({"sets": []}, r"dataset.sets=\[\] must name at least one data set"),
        ({"sets": ["slake"], "paths": {"slak": "x"}}, "dataset.paths names slak, but must name only slake"),
    ],
)
def test_mistakes_are_one_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MedVQA(**options)


def test_files_that_lack_something(several: Path) -> None:
    with pytest.raises(ConfigError, match="VQA-Med 2021 does not exist; download it from zenodo"):
        MedVQA(sets=["vqa_med_2021"], data_dir=str(several)).load()
    (several / "vqa_med_2020" / "VQAMed2020-Task1-VQAnswering-Test-ReferenceAnswers.txt").unlink()
    with pytest.raises(ConfigError, match="the question about t4 has no answer in any file"):
        MedVQA(sets=["vqa_med_2020"], data_dir=str(several)).load()
    (several / "slake" / "Slake1.0" / "imgs" / "xmlab1" / "source.jpg").unlink()
    with pytest.raises(ConfigError, match=r"imgs/xmlab1/source\.jpg of SLAKE does not exist"):
        MedVQA(sets=["slake"], data_dir=str(several)).load()
    assert set(READERS) == {"slake", "vqa_rad", "vqa_med_2019", "vqa_med_2020", "vqa_med_2021"}
