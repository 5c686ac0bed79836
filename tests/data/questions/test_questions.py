"""Questions about pictures as arrays, and the generated ones."""

from __future__ import annotations

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN
from fedbench.data.questions import _questions as q
from fedbench.data.questions._answers import is_closed, normalize_plain
from fedbench.data.questions._labelled import Labelled, mixed_arrays
from fedbench.data.questions.synthetic_medvqa import HOSPITALS, LABELS, SyntheticMedVQA


def table() -> list[q.Question]:
    """Two silos; the second one's test answer occurs in the first one's training part only."""
    return [
        q.Question(0, "Is it there?", "yes", True, TRAIN, 0),
        q.Question(0, "Is it there?", "no", True, TRAIN, 0),
        q.Question(1, "is it there", "no", True, TRAIN, 0),
        q.Question(1, "what is it", "a lump", False, TRAIN, 0),
        q.Question(1, "Is it there", "no", True, TEST, 0),
        q.Question(1, "where is it", "yes", False, TEST, 0),
        q.Question(2, "what is it", "cyst", False, TRAIN, 1),
        q.Question(2, "what is it", "a lump", False, TEST, 1),
    ]


def arrays(questions: list[q.Question]):
    known = q.vocabulary([x.question for x in questions])
    pictures = np.zeros((3, 1, 4, 4), np.uint8)
    return q.question_arrays(questions, pictures, lambda t: q.tokenize_words(t, known, 6), ["a", "b"], "x")


def test_answers_are_each_silos_own() -> None:
    made = arrays(table())
    assert made.targets.tolist() == [[2, 1], [1, 1], [1, 1], [0, 0], [1, 1], [2, 0], [0, 0], [-1, 0]]
    assert made.class_mask is not None and made.class_mask.tolist() == [[True] * 3, [True, False, False]]
    assert made.num_classes == 3 and made.shared is not None
    assert made.shared["image"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2] and len(made.parts()["image"]) == 3
    assert made.parts()["text"][4].tolist() == made.parts()["text"][2].tolist()  # words alone count
    with pytest.raises(ConfigError, match="x: there are no training questions of b"):
        arrays(table()[:6])


def test_majority_and_ceiling_by_hand() -> None:
    """The usual answer to "is it there" is no; to unknown words no, too, the most frequent one."""
    assert q.baselines(table(), q.answer_indices(table(), 2)) == [(0.5, 1.0), (0.0, 0.0)]


def test_answers_are_normalize_plain() -> None:
    assert normalize_plain("  The  Left Lung. ") == "the left lung" and normalize_plain(3) == "3"
    assert is_closed("yes") and not is_closed("yes", "OPEN ") and is_closed("left", "CLOSED ")


def test_words_as_tokens() -> None:
    known = q.vocabulary(["What is it?", "Is it 2?"])
    assert list(known) == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "2", "is", "it", "what"]
    rows = q.tokenize_words(["it is", "what is it is it"], known, 5)
    assert rows.tolist() == [[1, 6, 5, 2, 0], [1, 7, 5, 6, 2]]
    assert q.tokenize_words(["never seen"], known, 4).tolist() == [[1, 3, 3, 2]]


# -- generated ones --------------------------------------------------------------------------------------
def test_generated_questions() -> None:
    made, again = SyntheticMedVQA(train=60, test=40).load(), SyntheticMedVQA(train=60, test=40).load()
    assert made.digest == again.digest != SyntheticMedVQA(train=60, test=40, seed=1).load().digest
    assert made.input_shape == {"image": (1, 16, 16), "text": (8,)} and len(made) == 500 and made.num_domains == 5
    assert made.domain_names == list(HOSPITALS) and made.parts()["text"].max() < 64
    assert len(made.parts()["image"]) == 250  # two questions of each scan
    assert made.domain is not None and made.class_mask is not None
    closed = [set(made.targets[made.domain == i, 1]) for i in range(5)]
    assert closed == [{0, 1}, {0, 1}, {0, 1}, {0, 1}, {0}]
    unknown = made.targets[:, 0] < 0
    assert unknown.any() and (made.split[unknown] == TEST).all() and unknown.mean() < 0.05
    assert made.class_mask.sum(1)[3] == 5 and made.class_mask.sum(1)[4] == 8


def test_answers_need_the_scan() -> None:
    """The question alone gets half of them right, at most."""
    made = SyntheticMedVQA(train=400, test=200).load()
    text, answer = made.parts()["text"], made.targets[:, 0]
    for site in (0, 1, 2, 4):
        train, test = ((made.domain == site) & (made.split == part) for part in (TRAIN, TEST))
        usual = {}
        for row in {tuple(r) for r in text[train]}:
            counts = np.bincount(answer[train & (text == row).all(1)])
            usual[row] = counts.argmax()
        hits = [usual.get(tuple(r), -2) == a for r, a in zip(text[test], answer[test])]
        assert np.mean(hits) < 0.6


def test_hospitals_look_different() -> None:
    made = SyntheticMedVQA(train=100, test=2).load()
    assert made.shared is not None and made.domain is not None
    mean = [made.parts()["image"][made.shared["image"][made.domain == i]].mean() / 255 for i in range(5)]
    assert mean[0] > 0.55 and mean[1] > mean[4] + 0.1 and mean[3] < mean[4]


def test_generated_reports() -> None:
    made = SyntheticMedVQA("reports", train=80, test=20).load()
    assert made.task == "multilabel" and made.class_names == list(LABELS) and made.input_shape["text"] == (24,)  # type: ignore[index]
    none = made.targets[:, -1] == 1
    assert none.any() and not made.targets[none, :-1].any() and made.targets[~none].any(1).all()
    told = (made.parts()["text"] > 0).sum(1)
    assert told[none].max() < told[~none].max()


# -- questions beside labels -----------------------------------------------------------------------------
def test_labels_are_behind_questions() -> None:
    """Silos go on after those that ask; every one has its own classes; both show the same pictures."""
    known = q.vocabulary(["is it there", "clear lungs"])
    labelled = [
        Labelled(2, "clear lungs", [True, False, False, True], TRAIN, 0),
        Labelled(0, "clear", [False] * 4, TEST, 1),
    ]
    pictures = np.arange(48, dtype=np.uint8).reshape(3, 1, 4, 4)
    silos = ["a", "b"], ["c", "d"]
    made = mixed_arrays(table(), labelled, pictures, lambda t: q.tokenize_words(t, known, 5), silos, "x")
    answers = [[2, 2], [2, 1], [2, 1], [1, 0], [2, 1], [1, 2], [1, 0], [1, -1]]
    assert made.targets.tolist() == [*([*row, -1] for row in answers), [0, 0, 3], [0, -1, -1]]
    assert made.domain is not None and made.domain.tolist() == [0] * 6 + [1] * 2 + [2, 3]
    assert made.domain_names == ["a", "b", "c", "d"] and made.split[-2:].tolist() == [TRAIN, TEST]
    assert made.class_mask is not None and made.num_classes == 4
    assert made.class_mask.sum(1).tolist() == [3, 1, 4, 4] and made.class_mask[0].tolist() == [True] * 3 + [False]
    assert made.shared is not None and made.shared["image"][-2:].tolist() == [2, 0]
    assert made.parts()["text"][-2].tolist() == [1, known["clear"], known["lungs"], 2, 0]


def test_mixed_hospitals_are_those_of_either_kind() -> None:
    """Three of five ask what they ask elsewhere; the scans and labels of the others are those of reports."""
    made, asked, told = (SyntheticMedVQA(kind, 7, 20, 10).load() for kind in ("mixed", "vqa", "reports"))
    assert made.domain_names == ["inverted", "bright", "noisy", "inverted_2", "bright_2", "pale", "plain"]
    assert made.domain is not None and asked.domain is not None and told.domain is not None and made.shared is not None
    for silo, site in enumerate((0, 1, 2, 5, 6)):
        mine, same = made.targets[made.domain == silo], asked.targets[asked.domain == site]
        np.testing.assert_array_equal(mine[:, :2], np.stack([1 + same[:, 1], same[:, 0]], 1))
    assert made.class_mask is not None and asked.class_mask is not None
    assert made.class_mask.sum(1)[5:].tolist() == [6, 6] and made.num_classes == asked.num_classes > 6
    np.testing.assert_array_equal(made.class_mask[:5], asked.class_mask[[0, 1, 2, 5, 6]])
    for silo, site in ((5, 3), (6, 4)):
        mine = made.domain == silo
        hot = np.zeros((30, len(LABELS) + 1), np.float32)
        np.put_along_axis(hot, made.targets[mine][:, 1:], 1, 1)  # -1 is the last one
        np.testing.assert_array_equal(hot[:, :-1], told.targets[told.domain == site])
        pictures = made.parts()["image"][made.shared["image"][mine]]
        np.testing.assert_array_equal(pictures, told.parts()["image"][told.domain == site])
    with pytest.raises(
        ConfigError, match=r"dataset\.sites=3 is too small for dataset\.kind=mixed: set it to at least 4"
    ):
        SyntheticMedVQA("mixed", 3)
