"""scripts/draw_questions.py: questions whose answers are the labels, and the words of a vocabulary."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import script_files
from conftest import ROOT

NAMES = ["cat", "dog", "bird"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_files.load(ROOT / "scripts" / "draw_questions.py")


def test_answers_are_the_labels(script: ModuleType) -> None:
    """The open question's is the label's name; the closed one's is yes if it asks for that name, as often as no."""
    labels = np.random.default_rng(1).integers(0, 3, 400)
    rows = script.questions(labels, NAMES, np.random.default_rng(0))
    assert [row["image_name"] for row in rows[::2]] == [f"{i}.png" for i in range(400)]
    yes = 0
    for label, opened, closed in zip(labels, rows[::2], rows[1::2], strict=True):
        expected = NAMES[label]
        assert (opened["answer"], opened["answer_type"], closed["answer_type"]) == (expected, "OPEN", "CLOSED")
        assert not any(name in opened["question"] for name in NAMES)
        assert [name in closed["question"].split("?")[0].split() for name in NAMES].count(True) == 1
        assert (closed["answer"] == "Yes") == (expected in closed["question"])
        yes += closed["answer"] == "Yes"
    assert 160 < yes < 240


def test_words_are_small_letters_and_marks(script: ModuleType) -> None:
    assert script.words(["Is/are there 2 cats?", "is THIS"]) == {"is", "/", "are", "there", "2", "cats", "?", "this"}
