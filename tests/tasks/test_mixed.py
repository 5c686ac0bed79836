"""Questions beside labels: the loss is that of both tasks, scores are scikit-learn's, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, roc_auc_score
from tiny import close

from fedbench.core.options import ConfigError
from fedbench.tasks.mixed import CLOSED, LABEL_METRICS, LABELS, OPEN, QUESTION_METRICS, Mixed
from fedbench.tasks.multilabel import MultiLabel
from fedbench.tasks.vqa import VQA

# Two clients with four samples each: the first one answers from a list of four, the second one has three labels.
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])
Y = torch.tensor(
    [
        [[OPEN, 3, -1, -1], [CLOSED, 0, -1, -1], [OPEN, -1, -1, -1], [CLOSED, 1, -1, -1]],
        [[LABELS, 0, 2, -1], [LABELS, -1, -1, -1], [LABELS, 1, -1, -1], [LABELS, 0, 1, 2]],
    ]
)
OFFSETS = np.array([0, 4, 8, 8])  # a third client without samples
MASKS = np.array([*MASK.tolist(), [True] * 4])


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed))


def scores_of(z: torch.Tensor, y: torch.Tensor = Y, mask: torch.Tensor = MASK, task: Mixed | None = None) -> dict:
    task = task or Mixed()
    statistics = {name: t.flatten(0, 1) for name, t in task.sample_statistics(z, y, mask).items()}
    return task.scores(statistics, OFFSETS, np.array([*mask.tolist(), [True] * mask.shape[1]]))


def test_the_loss_is_that_of_both_tasks() -> None:
    """The vqa task's, and as many times the multilabel task's mean as there are labels."""
    z, loss = logits(), Mixed().loss(logits(), Y, MASK)
    close(loss[0], VQA().loss(z[:1], Y[:1, :, [1, 0]], MASK[:1])[0], 1e-6)
    hot = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    close(loss[1], 3 * MultiLabel().loss(z[1, :, :3], hot), 1e-6)
    summed = MultiLabel(loss="bce_sum")
    close(loss[1], summed.loss(z[1, :, :3], hot), 1e-6)
    close(loss[1:], summed.loss(z[1:], F.pad(hot, (0, 1))[None], MASK[1:]), 1e-6)
    close(
        Mixed().loss(z[1, :, :3], Y[1]), F.binary_cross_entropy_with_logits(z[1, :, :3], hot, reduction="none").sum(-1)
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_scikit_learns(seed: int) -> None:
    z = logits(seed)
    found = scores_of(z)
    answers = np.array([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    guesses = z[0].numpy() > 0
    close(found["micro_f1"][0], f1_score(answers, guesses, average="micro"))
    close(found["f1_flat"][0], f1_score(answers.ravel(), guesses.ravel(), average="weighted"))
    true, odds = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]), z[1, :, :3].numpy()
    close(found["micro_f1"][1], f1_score(true, odds > 0, average="micro"))
    close(found["auc"][1], roc_auc_score(true, odds, average="macro"))
    close(found["f1"][1], f1_score(true, odds > 0, average="macro"))
    close(found["sample_f1"][1], f1_score(true, odds > 0, average="samples", zero_division=np.nan))  # type: ignore[arg-type]


def test_scores_of_questions_by_hand() -> None:
    """An answer outside of the list is wrong, whatever is answered."""
    z = torch.zeros(2, 4, 4)
    z[0, 0, 3], z[0, 1, 2], z[0, 2, 0], z[0, 3, 1] = (
        1,
        1,
        1,
        -1,
    )  # right, wrong, outside, wrong: the first of the others
    found = scores_of(z)
    np.testing.assert_allclose(found["accuracy"], [1 / 4, np.nan, np.nan])
    np.testing.assert_allclose(found["accuracy_open"], [1 / 2, np.nan, np.nan])
    np.testing.assert_allclose(found["accuracy_closed"], [0, np.nan, np.nan])
    np.testing.assert_allclose(found["ceiling"], [3 / 4, np.nan, np.nan])
    np.testing.assert_allclose(found["micro_f1"][0], 2 * 1 / (3 + 3))  # 16 cells: 3 true, 3 predicted, 1 of them right
    np.testing.assert_allclose(found["f1_flat"][0], (3 * 2 / 6 + 13 * 2 * 11 / 26) / 16)


def test_scores_of_labels_by_hand() -> None:
    """Predicted are {0}, none, none, {0}: label 2 is true and never predicted; the second sample is left out of the
    samples' mean."""
    z = torch.full((2, 4, 4), -1.0)
    z[1, 0, 0], z[1, 3, 0], z[1, :, 3] = 1, 2, 9  # class 3 is not the client's
    found = scores_of(z)
    np.testing.assert_allclose(found["sample_f1"][1], (2 / 3 + 0 + 2 / 4) / 3)
    np.testing.assert_allclose(found["f1"][1], (1 + 0 + 0) / 3)
    np.testing.assert_allclose(found["micro_f1"][1], 2 * 2 / (2 + 6))
    np.testing.assert_allclose(found["auc"][1], (1 + (0.5 + 0.5) / 2 + 0.5) / 3)
    np.testing.assert_allclose([found[name][0] for name in LABEL_METRICS], np.nan)
    np.testing.assert_allclose([found[name][1] for name in QUESTION_METRICS], np.nan)
    assert all(np.isnan(values[2]) for values in found.values())


def test_a_label_that_nobody_has_or_predicts_is_left_out() -> None:
    z, y = torch.full((2, 4, 4), -1.0), Y.clone()
    z[1, :, 0], y[1, :, 1:] = 1, torch.tensor([0, -1, -1])
    found = scores_of(z, y)
    assert found["f1"][1] == 1 and np.isnan(found["auc"][1])


def test_longer_lists_of_others_change_nothing() -> None:
    more, longer = torch.cat([logits(), torch.full((2, 4, 5), 9.0)], 2).requires_grad_(), F.pad(MASK, (0, 5))
    loss = Mixed().loss(more, Y, longer)
    close(loss, Mixed().loss(logits(), Y, MASK), 1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), more)
    assert not gradient[..., 4:].any() and not gradient[1, :, 3].any() and gradient[0].any()
    for name, values in scores_of(more.detach(), mask=longer).items():
        np.testing.assert_allclose(values, scores_of(logits())[name], rtol=1e-6)


def test_one_kind_alone_has_the_scores_of_its_task() -> None:
    z, y, mask = logits()[:1], Y[:1, :, [1, 0]].clone(), MASK[:1]
    y[..., 1] = y[..., 1] == CLOSED
    task = VQA(f1=True)
    statistics = {name: t[0] for name, t in task.sample_statistics(z, y, mask).items()}
    expected, found = task.scores(statistics, OFFSETS[:2], mask.numpy()), scores_of(logits())
    mine = {name: t[0] for name, t in Mixed().sample_statistics(z, Y[:1], mask).items()}
    alone = Mixed().scores(mine, OFFSETS[:2], mask.numpy())
    assert all(np.isnan(alone[name]).all() for name in LABEL_METRICS)
    for name in ("loss", "micro_f1", *QUESTION_METRICS):
        np.testing.assert_allclose(found[name][0], expected[name][0], rtol=1e-6)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (np.zeros((3, 1), np.int64), r"expected int64 \[n, 1 \+ L\]"),
        (np.array([[LABELS, 0, 4]]), "classes span 0 to 4, expected -1 to 3"),
        (np.array([[3, 0]]), r"column 0 of .* contains 3: store 0 \(labels\), 1 "),
        (np.array([[OPEN, 0, 1]]), "1 questions with several answers: store the answer of a question in column 1"),
    ],
)
def test_targets_that_are_none(targets: np.ndarray, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mixed().check(targets, 4)


def test_sample_f1_of_multilabel_is_an_option() -> None:
    assert (
        "sample_f1" not in MultiLabel().higher_is_better and "sample_f1" in MultiLabel(sample_f1=True).higher_is_better
    )
    z, y = torch.tensor([[1.0, -1], [-1, -1]])[None], torch.tensor([[1.0, 1], [0, 0]])[None]
    statistics = {name: t[0] for name, t in MultiLabel(sample_f1=True).sample_statistics(z, y).items()}
    assert MultiLabel(sample_f1=True).scores(statistics, np.array([0, 2]))["sample_f1"] == pytest.approx([2 / 3])
    assert "sample_f1" not in MultiLabel().scores(statistics, np.array([0, 2]))
