"""VQA-RAD: a generated folder in its published layout, and the real files where they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN
from fedbench.data.vqa_rad import ORGANS, VQARad


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
    made = VQARad(str(folder), side=16, tokens=6).load()
    assert made.input_shape == {"image": (1, 16, 16), "text": (6,)} and len(made.parts()["image"]) == 3
    assert made.domain_names == ["head", "chest", "abd"] and made.split.tolist() == [TRAIN] * 5 + [TEST] * 2
    assert made.targets.tolist() == [[1, 1], [1, 1], [0, 1], [0, 0], [0, 0], [-1, 1], [0, 1]]
    assert made.shared is not None and made.shared["image"].tolist() == [0, 1, 2, 0, 1, 0, 2]
    assert abs(int(made.parts()["image"][1].mean()) - 80) < 3
    zipped = shutil.make_archive(str(tmp_path / "rad"), "zip", folder)
    assert VQARad(zipped, side=16, tokens=6).load().digest == made.digest
    below = VQARad(side=16, tokens=6, data_dir=str(tmp_path / "data"))
    shutil.copytree(folder, tmp_path / "data" / "vqa_rad")
    assert below.load().digest == made.digest
    assert VQARad(str(folder), side=16, tokens=6, color="rgb").load().input_shape["image"] == (3, 16, 16)  # type: ignore[index]


def test_pieces_of_words(folder: Path, tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "is", "it", "there", "?", "how", "where", "many", "are"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    text = VQARad(str(folder), side=8, tokens=8, vocab=str(tmp_path)).load().parts()["text"]
    assert text[0].tolist() == [2, 4, 5, 6, 7, 3, 0, 0] and text[3].tolist() == [2, 8, 10, 11, 6, 7, 3, 0]


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: VQA-RAD is not there; it is at osf\.io/89kps"):
        VQARad(str(tmp_path / "nowhere")).load()
    (folder / "testset.json").write_text("{")
    with pytest.raises(ConfigError, match=r"testset\.json cannot be read"):
        VQARad(str(folder)).load()


def test_the_real_one(shared_data: Path) -> None:
    """Sizes as published, but for one picture that nothing is asked about; ceilings by organ; every test picture occurs
    in training."""
    made = VQARad(str(shared_data / "vqa_rad.zip"), side=16).load()
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
