"""Questions: losses by hand, scores of answers in and outside of a client's list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import close

from fedbench.core.options import ConfigError
from fedbench.tasks.vqa import VQA

MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [2, 3, 4] and targets [2, 3, 2]; one answer is in no list."""
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    return logits, torch.tensor([[[0, 1], [2, 0], [-1, 0]], [[1, 1], [0, 0], [1, 0]]])


def test_bce_is_summed_over_the_clients_answers() -> None:
    z, y = batch()
    loss = VQA().loss(z, y, MASK)
    for i, own in ((0, 3), (1, 2)):
        for b in range(3):
            hot = torch.zeros(own)
            if y[i, b, 0] >= 0:
                hot[y[i, b, 0]] = 1
            close(loss[i, b], own * F.binary_cross_entropy_with_logits(z[i, b, :own], hot), 1e-6)


def test_cross_entropy_is_over_them_too() -> None:
    z, y = batch()
    loss = VQA("cross_entropy").loss(z, y, MASK)
    close(loss[0, 1], F.cross_entropy(z[0, 1, :3], torch.tensor(2)), 1e-6)
    close(loss[1, 0], F.cross_entropy(z[1, 0, :2], torch.tensor(1)), 1e-6)
    close(loss[0, 2], -z[0, 2, :3].log_softmax(0).mean(), 1e-6)


@pytest.mark.parametrize("options", [{}, {"loss": "cross_entropy"}, {"f1": True}])
def test_longer_lists_of_others_change_nothing(options: dict[str, Any]) -> None:
    z, y = batch()
    more, longer = torch.cat([z, torch.full((2, 3, 5), 9.0)], 2).requires_grad_(), F.pad(MASK, (0, 5))
    task, offsets = VQA(**options), np.array([0, 3, 6])
    loss = task.loss(more, y, longer)
    close(loss, task.loss(z, y, MASK), 1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), more)
    assert not gradient[..., 4:].any() and torch.isfinite(gradient).all()
    some = []
    for logits, mask in ((z, MASK), (more.detach(), longer)):
        statistics = {name: t.flatten(0, 1) for name, t in task.sample_statistics(logits, y, mask).items()}
        some.append(task.scores(statistics, offsets, mask.numpy()))
    for name in some[0]:
        np.testing.assert_allclose(some[0][name], some[1][name], rtol=1e-6)


def test_scores_by_hand() -> None:
    """Client 0: closed right, open right, open outside of the list; client 1: closed wrong, no open ones."""
    z = torch.tensor([[[5.0, 0, 0, 9], [0, 0, 5, 9], [5.0, 1, 0, 9]], [[5.0, 0, 9, 9], [5.0, 0, 9, 9], [5.0, 0, 9, 9]]])
    y = torch.tensor([[[0, 1], [2, 0], [-1, 0]], [[1, 1], [1, 1], [0, 1]]])
    task = VQA(f1=True)
    statistics = {name: t.flatten(0, 1) for name, t in task.sample_statistics(z, y, MASK).items()}
    scores = task.scores(statistics, np.array([0, 3, 6, 6]), np.array([*MASK.tolist(), [True] * 4]))
    np.testing.assert_allclose(scores["accuracy"][:2], [2 / 3, 1 / 3])
    np.testing.assert_allclose(scores["accuracy_open"][:2], [0.5, np.nan])
    np.testing.assert_allclose(scores["accuracy_closed"][:2], [1, 1 / 3])
    np.testing.assert_allclose(scores["ceiling"][:2], [2 / 3, 1])
    np.testing.assert_allclose(scores["micro_f1"][:2], [2 * 2 / (4 + 2), 2 * 1 / (3 + 3)])
    yes, no = 4 / 6, 2 * 5 / (5 + 7)  # client 0: 9 cells, 2 true, 4 predicted, 2 of them right
    np.testing.assert_allclose(scores["f1_flat"][0], (2 * yes + 7 * no) / 9)
    assert all(np.isnan(value[2]) for value in scores.values())
    n, closed = np.array([3, 3]), np.array([1, 3])
    parts = np.nan_to_num(scores["accuracy_open"][:2]) * (n - closed) + scores["accuracy_closed"][:2] * closed
    np.testing.assert_allclose(scores["accuracy"][:2] * n, parts)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (np.zeros((3, 3), np.int64), r"expected int64 \[n, 2\]"),
        (np.array([[4, 0]]), "answers span 4 to 4, expected -1 to 3"),
        (np.array([[0, 2]]), "column 1 of .* contains 2: store 1 for a closed question"),
    ],
)
def test_targets_that_are_none(targets: np.ndarray, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VQA().check(targets, 4)
