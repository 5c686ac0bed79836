"""Which answers are classes, and how they are compared: by hand, through a reader, and on VQA-RAD where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._answers import TOP, AnswerRule, normalize_plain, normalize_vqa
from fedbench.data.questions.med_vqa import MedVQA

TRAINED = ("yes", "Yes.", "the left lung", "left lung", "cyst", "cyst", "two", "2")
TESTED = ("yes", "two", "a left lung", "mass")


def written(root: Path, trained: tuple[str, ...] = TRAINED, tested: tuple[str, ...] = TESTED) -> Path:
    """VQA-RAD's layout, one picture, with these answers."""
    row = {"image_name": "a.jpg", "image_organ": "HEAD", "question": "What is it?", "answer_type": "OPEN"}
    (root / "images").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(root / "images" / "a.jpg")
    for name, answers in (("trainset", trained), ("testset", tested)):
        (root / f"{name}.json").write_text(json.dumps([row | {"answer": answer} for answer in answers]))
    return root


def load(path: Path, **options: Any) -> Arrays:
    return MedVQA(sets=["vqa_rad"], paths={"vqa_rad": str(path)}, side=8, **options).load()


def numbers(arrays: Arrays, split: int) -> list[int]:
    return arrays.targets[arrays.split == split, 0].tolist()


def test_rare_answers_are_no_classes(tmp_path: Path) -> None:
    """All questions stay; those with other answers are of none."""
    made, few = load(written(tmp_path / "rad")), load(tmp_path / "rad", min_count=2)
    assert numbers(made, TRAIN) == [5, 5, 3, 2, 1, 1, 4, 0] and numbers(made, TEST) == [5, 4, -1, -1]
    assert numbers(few, TRAIN) == [1, 1, -1, -1, 0, 0, -1, -1] and numbers(few, TEST) == [1, -1, -1, -1]
    assert few.class_mask is not None and few.class_mask.tolist() == [[True, True]]
    with pytest.raises(ConfigError, match=r"no training answer of vqa_rad occurs dataset\.min_count=3 times"):
        load(tmp_path / "rad", min_count=3)


def test_only_the_most_frequent_answers_and_their_questions(tmp_path: Path) -> None:
    """Of 103 answers those that occur twice and the first ones in the alphabet are kept; of a test part, too, nothing
    else is left."""
    often, once = [f"z{i}" for i in range(40)], [f"b{i:02}" for i in range(63)]
    trained = (*often, *often, *once)
    made = load(written(tmp_path / "rad", trained, ("z3", "b59", "b60", "mass")), answers="top100_drop")
    assert made.class_mask is not None and made.class_mask.sum() == TOP == 100
    assert len(numbers(made, TRAIN)) == 2 * 40 + 60 and min(numbers(made, TRAIN)) == 0
    assert numbers(made, TEST) == [60 + sorted(often).index("z3"), 59]


def test_answers_as_vqa_compares_them(tmp_path: Path) -> None:
    made = load(written(tmp_path / "rad"), normalizer="vqa")  # 2, cyst, left lung, yes
    assert numbers(made, TRAIN) == [3, 3, 2, 2, 1, 1, 0, 0] and numbers(made, TEST) == [3, 0, 2, -1]


@pytest.mark.parametrize(
    ("answer", "compared"),
    [
        ("  The Left  Lung. ", "left lung"),
        ("Two cysts, one mass", "2 cysts 1 mass"),
        ("none", "0"),
        ("3.5 cm", "3.5 cm"),
        ("1,000", "1000"),
        ("x-ray/ct (chest)", "x ray ct chest"),
        ("It isnt, youre right", "it isn't you're right"),
        ("patient's right", "patient's right"),
        ("its well", "its well"),
        (7, "7"),
    ],
)
def test_vqas_rules(answer: object, compared: str) -> None:
    assert normalize_vqa(answer) == compared == normalize_vqa(compared)


def test_plain_keeps_articles() -> None:
    assert normalize_plain("  The  Left Lung. ") == "the left lung" and AnswerRule().normalize("Two") == "two"
    assert AnswerRule(normalizer="vqa").normalize("The two") == "2"


@pytest.mark.slow
def test_vqa_rads(shared_data: Path) -> None:
    """474 answers, of which 297 occur twice; 404 of 451 test questions can be answered."""
    path = shared_data / "vqa_rad.zip"
    made = {count: load(path, min_count=count) for count in (1, 2)}
    assert [int(one.class_mask.sum()) for one in made.values() if one.class_mask is not None] == [474, 297]
    assert sum(number >= 0 for number in numbers(made[1], TEST)) == 404
    assert len(made[2]) == len(made[1]) == 3064 + 451
    few = load(path, answers="top100_drop")
    assert few.class_mask is not None and few.class_mask.sum() == 100
    assert few.targets[:, 0].min() == 0 and 300 < len(numbers(few, TEST)) < 404
    compared = load(path, normalizer="vqa")
    assert compared.class_mask is not None and 400 < compared.class_mask.sum() < 474
