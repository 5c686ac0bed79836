"""VQA-RAD: generated folders in its published and its repackaged layout, and the real files where they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN
from fedbench.data.questions.med_vqa import MedVQA
from fedbench.data.questions.vqa_rad import ORGANS, VQARad


def row(image: int, organ: str, question: str, answer: object, kind: str = "OPEN") -> dict[str, object]:
    return {
        "image_name": f"synpic{image}.jpg",
        "image_organ": organ,
        "question": question,
        "answer": answer,
        "answer_type": kind,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rad" / "images").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(np.full((20, 30), 80 * i, np.uint8)).save(tmp_path / "rad" / "images" / f"synpic{i}.jpg")
    train = [
        *(row(i, organ, "Is it there?", "Yes", "CLOSED ") for i, organ in enumerate(ORGANS)),
        row(0, "HEAD", "How many are there?", 2),
        row(1, "CHEST", "Where is it?", "  The left Lung. "),
    ]
    test = [row(0, "HEAD", "Is it there", "no", "CLOSED"), row(2, "ABD", "Is it there?", "yes", "CLOSED")]
    (tmp_path / "rad" / "trainset.json").write_text(json.dumps(train))
    (tmp_path / "rad" / "testset.json").write_text(json.dumps(test))
    return tmp_path / "rad"


def test_a_folder_and_its_zip(folder: Path, tmp_path: Path) -> None:
    made = VQARad(path=str(folder), side=16, tokens=6).load()
    assert made.input_shape == {"image": (1, 16, 16), "text": (6,)} and len(made.parts()["image"]) == 3
    assert made.domain_names == ["head", "chest", "abd"] and made.split.tolist() == [TRAIN] * 5 + [TEST] * 2
    assert made.targets.tolist() == [[1, 1], [1, 1], [0, 1], [0, 0], [0, 0], [-1, 1], [0, 1]]
    assert made.shared is not None and made.shared["image"].tolist() == [0, 1, 2, 0, 1, 0, 2]
    assert abs(int(made.parts()["image"][1].mean()) - 80) < 3
    zipped = shutil.make_archive(str(tmp_path / "rad"), "zip", folder)
    assert VQARad(path=zipped, side=16, tokens=6).load().digest == made.digest
    below = VQARad(side=16, tokens=6, data_dir=str(tmp_path / "data"))
    shutil.copytree(folder, tmp_path / "data" / "vqa_rad")
    assert below.load().digest == made.digest
    assert VQARad(path=str(folder), side=16, tokens=6, color="rgb").load().input_shape["image"] == (3, 16, 16)  # type: ignore[index]


@pytest.fixture
def published(folder: Path, tmp_path: Path) -> Path:
    """The same questions in the published file, test and training mixed, with all its keys."""
    root = tmp_path / "osf"
    shutil.copytree(folder / "images", root / "VQA_RAD Image Folder")
    parts = {part: json.loads((folder / f"{part}set.json").read_text()) for part in ("train", "test")}
    rows = [(row, f"{'test_' if part == 'test' else ''}{kind}") for part, listed in parts.items()
            for row, kind in zip(listed, ["freeform", "para"] * 3)]  # fmt: skip
    order = [0, 5, 1, 2, 6, 3, 4]
    more = {"qid_linked_id": "03f451ca-de62-4617-9679-e836026a7642", "image_case_url": "https://medpix.nlm.nih.gov/case",
            "evaluation": "not evaluated", "question_type": "PRES", "question_rephrase": "NULL",
            "question_relation": "NULL", "question_frame": "Is there something?"}  # fmt: skip
    listed = [{"qid": qid, "phrase_type": rows[i][1], **more, **rows[i][0]} for qid, i in enumerate(order)]
    (root / "VQA_RAD Dataset Public.json").write_text(json.dumps(listed, indent=2))
    return root


def test_the_published_file(published: Path, folder: Path, tmp_path: Path) -> None:
    """phrase_type says which questions are tests; what is read is what the repackaged form of these questions holds."""
    wanted = VQARad(path=str(folder), side=16, tokens=6).load()
    found = VQARad(path=str(published), side=16, tokens=6).load()
    assert found.digest == wanted.digest and found.split.tolist() == [TRAIN] * 5 + [TEST] * 2
    zipped = shutil.make_archive(str(tmp_path / "osf"), "zip", published)
    assert VQARad(path=zipped, side=16, tokens=6).load().digest == wanted.digest
    med = MedVQA(sets=["vqa_rad"], paths={"vqa_rad": str(published)}, side=16).load()
    assert med.domain_names == ["vqa_rad"] and len(med) == 7


def test_mistakes_in_the_published_form(published: Path) -> None:
    file = published / "VQA_RAD Dataset Public.json"
    listed = json.loads(file.read_text())
    file.write_text(json.dumps([{k: v for k, v in row.items() if k != "phrase_type"} for row in listed]))
    with pytest.raises(ConfigError, match=r"a question of VQA-RAD has no phrase_type"):
        VQARad(path=str(published)).load()
    file.write_text(json.dumps(listed))
    (published / "VQA_RAD Image Folder" / "synpic1.jpg").unlink()
    with pytest.raises(ConfigError, match=r"VQA_RAD Image Folder/synpic1\.jpg of VQA-RAD does not exist"):
        VQARad(path=str(published)).load()
    file.unlink()
    with pytest.raises(ConfigError, match=r"trainset\.json or VQA_RAD Dataset Public\.json of VQA-RAD does not exist"):
        VQARad(path=str(published)).load()


def test_pieces_of_words(folder: Path, tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "is", "it", "there", "?", "how", "where", "many", "are"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    text = VQARad(path=str(folder), side=8, tokens=8, vocab=str(tmp_path)).load().parts()["text"]
    assert text[0].tolist() == [2, 4, 5, 6, 7, 3, 0, 0] and text[3].tolist() == [2, 8, 10, 11, 6, 7, 3, 0]


def test_another_number_of_questions_gets_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = VQARad(path=str(folder), side=8).load()
    train, test = (int((asked.split == part).sum()) for part in (TRAIN, TEST))
    assert f"{folder} is not a complete VQA-RAD: it has {train} training and {test} test questions" in caplog.text


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere: this folder or zip of VQA-RAD does not exist; download it from osf\.io/89kps"
    ):
        VQARad(path=str(tmp_path / "nowhere")).load()
    (folder / "testset.json").write_text("{")
    with pytest.raises(ConfigError, match=r"testset\.json cannot be read"):
        VQARad(path=str(folder)).load()


def test_the_real_one(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes of the repackaged form, without one picture that nothing is asked about; ceilings by organ; every test
    picture occurs in training."""
    made = VQARad(path=str(shared_data / "vqa_rad.zip"), side=16).load()
    assert "no complete" not in caplog.text
    train = made.split == TRAIN
    assert (train.sum(), (~train).sum(), len(made.parts()["image"])) == (3064, 451, 314)
    assert made.domain is not None and np.bincount(made.domain[train]).tolist() == [977, 1088, 999]
    assert made.targets[~train, 1].sum() == 272
    ceilings = [(made.targets[~train & (made.domain == i), 0] >= 0).mean() for i in range(3)]
    np.testing.assert_allclose(ceilings, [0.899, 0.914, 0.848], atol=5e-4)
    assert made.shared is not None
    assert set(made.shared["image"][~train]) <= set(made.shared["image"][train])
    words = made.parts()["text"]
    assert words.max() < 1138 + 4 and (words[:, -1] == 0).sum() > 3000
