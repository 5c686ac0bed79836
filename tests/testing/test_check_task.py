"""Checks of a user's task: correct ones pass, and each check finds its mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract import assert_failed

from fedbench.core.options import NonNegative
from fedbench.tasks.base import Task, mean_loss
from fedbench.tasks.classification import Classification
from fedbench.tasks.regression import Regression
from fedbench.testing import check_task, task


class Focal(Classification):
    """Lin et al., ICCV 2017: (1 - p)^gamma times the cross-entropy."""

    def __init__(self, gamma: NonNegative = 2.0):
        super().__init__()
        self.gamma = gamma

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)  # [..., B]
        return (1 - (-each).exp()) ** self.gamma * each

    loss_and_gradient = Task.loss_and_gradient  # by autograd


class Quantiles(Task):
    """The pinball loss of three quantiles; coverage: how often the target is between the outer ones."""

    kind = "regression"
    primary = "loss"
    higher_is_better = {"loss": False, "coverage": True}
    fractions = frozenset(("coverage",))

    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        self.quantiles = list(quantiles)

    def outputs(self, num_classes):
        return len(self.quantiles)

    def loss(self, logits, y, class_mask=None):
        below = y.view(*logits.shape[:-1], 1) - logits  # [..., B, R]
        q = torch.tensor(self.quantiles, device=logits.device)
        return torch.maximum(q * below, (q - 1) * below).mean(-1)

    def sample_statistics(self, logits, y, class_mask=None):
        target = y.view(logits.shape[:-1])
        inside = (logits.amin(-1) <= target) & (target <= logits.amax(-1))
        return {"loss": self.loss(logits, y), "inside": inside.float()}

    def scores(self, statistics, offsets, class_mask=None):
        return {"loss": mean_loss(statistics["loss"], offsets), "coverage": mean_loss(statistics["inside"], offsets)}


class WithoutWeight(Classification):
    """A gradient by hand that forgets the weight."""

    def loss_and_gradient(self, logits, y, weight, class_mask):
        real = torch.ones_like(weight) / weight.shape[1]
        return super().loss_and_gradient(logits, y, real, class_mask)


class Normalized(Classification):
    """Divides by the largest loss of the batch."""

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)
        return each / each.detach().amax(-1, keepdim=True)


class Averaged(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y, class_mask).mean(-1)


class HalfDone(Classification):
    """Another loss, and the gradient of the old one."""

    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y, class_mask) ** 2

    def loss_and_gradient(self, logits, y, weight, class_mask):
        return self.loss(logits, y, class_mask), Classification().loss_and_gradient(logits, y, weight, class_mask)[1]


class Unmasked(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y)


class Undeclared(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        return super().scores(statistics, offsets, class_mask) | {"confidence": np.zeros(len(offsets) - 1)}


class Pooled(Classification):
    """Accuracy relative to that of all clients."""

    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return scores | {"accuracy": scores["accuracy"] / max(np.nanmax(scores["accuracy"]), 1e-9)}


class PerBatch(Classification):
    """Statistics of a sample that depend on its batch."""

    def sample_statistics(self, logits, y, class_mask=None):
        statistics = super().sample_statistics(logits, y, class_mask)
        return statistics | {"logits": statistics["logits"] - statistics["logits"].mean(1, keepdim=True)}


class Zero(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        return {name: np.nan_to_num(v) for name, v in super().scores(statistics, offsets, class_mask).items()}


class OtherLoss(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return scores | {"loss": 2 * scores["loss"]}


class Upside(Regression):
    """Calls a large error a good one."""

    higher_is_better = {"loss": False, "distance": True}

    def __init__(self):
        super().__init__(primary="distance")

    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return {"loss": scores["loss"], "distance": scores["rmse"]}


class Ascending(Classification):
    """A sign that is wrong, in the loss's graph alone."""

    def loss(self, logits, y, class_mask=None):
        return super().loss(2 * logits.detach() - logits, y, class_mask)


class Restless(Classification):
    """A number of its own for each task."""

    def setup(self, federation):
        self.weights = torch.rand(federation.num_classes)


class Peeking(Classification):
    def setup(self, federation):
        self.weights = 1 + torch.bincount(federation.targets, minlength=federation.num_classes)


class Noisy(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits + 0.1 * torch.randn_like(logits), y, class_mask)


class Wordy(Classification):
    def labels(self, targets, num_classes):
        return targets.astype(np.float32)


class First(Classification):
    """The loss of the first client goes to everybody."""

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)
        return each * torch.arange(1, len(each) + 1).view(-1, *[1] * (each.dim() - 1)) if each.dim() > 1 else each

    loss_and_gradient = Classification.__mro__[1].loss_and_gradient


MISTAKES = [
    (WithoutWeight, "padding_is_ignored", "Remedy: multiply the gradient of each sample by its weight"),
    (Normalized, "samples_are_independent", "the other samples of its batch"),
    (Averaged, "loss_is_per_sample", "Remedy: return one value of each"),
    (HalfDone, "gradient_is_autograds", "the gradient of `loss_and_gradient`"),
    (Unmasked, "class_mask_confines", "class_mask excludes"),
    (Undeclared, "scores_are_declared", "differ in confidence"),
    (Pooled, "clients_are_scored_alone", "for client"),
    (PerBatch, "scores_are_streamed", "must compute each sample independently"),
    (Zero, "nobody_without_samples_is_scored", "which returns NaN for 0 samples"),
    (OtherLoss, "the_loss_is_a_score", "the mean of `loss`"),
    (Upside, "descent_improves_the_primary_score", "distance gets worse while the loss falls"),
    (Ascending, "descent_improves_the_primary_score", "does not lower the loss"),
    (Restless, "it_has_a_key", "different keys"),
    (Peeking, "only_training_data_are_seen", "depends on test samples"),
    (Noisy, "nothing_is_drawn", "is random"),
    (Wordy, "targets_have_labels", "float32"),
    (First, "training_agrees", "mixes clients"),
]


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5}])
def test_a_focal_loss_passes(options: dict) -> None:
    report = check_task(Focal, options)
    report.raise_if_failed()
    assert report.skipped == {} and "on classification targets" in report.setting


def test_a_quantile_loss_passes() -> None:
    report = check_task(Quantiles, {"quantiles": [0.25, 0.5, 0.75]})
    report.raise_if_failed()
    assert list(report.skipped) == ["class_mask_confines"] and "on regression targets" in report.setting


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_task(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(task.SUITE.checks)
