"""One class a sample: cross-entropy, optionally weighted by class and smoothed."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import Positive, UnitInterval, require
from fedbench.tasks._counts import area_under_roc, clients_of, count_by_class, log_odds, mean_of_defined
from fedbench.tasks.base import SampleStatistics, Task, Training, check_primary, mean_loss, ratio


class Classification(Task):
    """Cross-entropy; y [..., B] int64, logits [..., B, C].

    class_weights: factor of a sample's loss by its class: none; balanced, n / (C n_c) of the training parts of all
    clients together (1 on average over their samples); or a list of C.  label_smoothing: share of a target that is
    spread over the client's classes.  primary: the score to go by.
    """

    kind = "classification"
    primary = "accuracy"
    higher_is_better = {"loss": False, "accuracy": True, "balanced_accuracy": True, "f1": True, "auc": True}
    fractions = frozenset(("accuracy", "balanced_accuracy", "f1", "auc"))
    single_label = True

    def __init__(
        self,
        class_weights: Literal["none", "balanced"] | list[Positive] = "none",
        label_smoothing: UnitInterval = 0.0,
        primary: str = "accuracy",
    ):
        require(
            class_weights in ("none", "balanced") or isinstance(class_weights, list | tuple),
            f"task.class_weights must be none, balanced or a list of one number a class, got {class_weights}",
        )
        require(
            0 <= label_smoothing < 1,
            f"task.label_smoothing must be at least 0 and below 1, got {label_smoothing}",
        )
        require(
            isinstance(class_weights, str) or all(weight > 0 for weight in class_weights),
            f"task.class_weights must be numbers > 0, got {class_weights}",
        )
        self.class_weights, self.label_smoothing = class_weights, label_smoothing
        self.primary = check_primary(primary, self)
        self.weights: Tensor | None = None  # [C]
        plain = class_weights == "none" and not label_smoothing
        self.has_closed_form = plain and type(self).loss is Classification.loss  # a subclass may have another loss

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but int64 [n] from 0 to C - 1."""
        check_labels(targets, num_classes, 1, self.kind)
        given = len(self.class_weights) if not isinstance(self.class_weights, str) else num_classes
        require(given == num_classes, f"task.class_weights has {given} numbers, and the data set {num_classes} classes")

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """The targets."""
        return targets

    def setup(self, federation: Training) -> None:
        """Weigh classes by how often they are trained on."""
        if self.class_weights == "none":
            return
        if self.class_weights == "balanced":
            y = federation.targets.cpu().numpy()[federation.splits["train"].indices]
            count = np.bincount(y, minlength=federation.num_classes)  # [C]
            weights = np.where(count > 0, len(y) / (np.count_nonzero(count) * np.maximum(count, 1)), 1.0)
        else:
            weights = np.asarray(self.class_weights, np.float64)
        self.weights = torch.from_numpy(weights).float().to(federation.device)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Cross-entropy of every sample.  # [..., B]"""
        masked = mask_logits(logits, class_mask)
        z, labels = masked.reshape(-1, logits.shape[-1]), y.reshape(-1)  # [n, C], [n]
        if _is_narrow(z):
            loss = _NarrowCrossEntropy.apply(z, labels).view(y.shape)
        else:
            loss = F.cross_entropy(z, labels, reduction="none").view(y.shape)  # [..., B]
        if self.label_smoothing:
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * _uniform_loss(masked, class_mask)
        return loss if self.weights is None else loss * self.weights[y]

    def loss_and_gradient(
        self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the plain loss in closed form: weight * (softmax - one-hot)."""
        if not self.has_closed_form:
            return super().loss_and_gradient(logits, y, weight, class_mask)
        z = mask_logits(logits, class_mask).reshape(-1, logits.shape[-1])  # [n, C], n = k B
        label, share, over = y.reshape(-1, 1), weight.reshape(-1, 1), 1
        if _is_narrow(z):  # [C, n]
            z, label, share, over = z.t().contiguous(), label.t(), share.t(), 0
        log_p = z.log_softmax(over)
        loss = -log_p.gather(over, label)
        grad = log_p.exp_().mul_(share).scatter_add_(over, label, -share)
        return loss.view(y.shape), (grad if over else grad.t()).view(logits.shape)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """The logits themselves: the area under the ROC curve needs all of a client's."""
        return {"logits": mask_logits(logits, class_mask), "y": y}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """balanced_accuracy: over the classes among the client's targets.  f1: macro, over classes among its targets or
        predictions.  auc: C = 2: of class 1; else macro one-vs-rest over classes that some but not all of its samples
        have."""
        allowed = None if class_mask is None else torch.from_numpy(class_mask)[clients_of(offsets)]  # [n, C]
        loss = self._loss_of(statistics["logits"], statistics["y"], allowed)
        logits, targets = (
            statistics["logits"].float().cpu().numpy(),
            statistics["y"].cpu().numpy(),
        )  # [n, C], [n]
        num, (_, num_classes), client = len(offsets) - 1, logits.shape, clients_of(offsets)
        predicted = logits.argmax(1)  # [n]
        hit = predicted == targets
        tp = count_by_class(targets[hit], client[hit], num, num_classes)  # [N, C]
        p = count_by_class(predicted, client, num, num_classes)
        l = count_by_class(targets, client, num, num_classes)  # noqa: E741
        odds = logits[:, 1:] - logits[:, :1] if num_classes == 2 else log_odds(logits, predicted)  # [n, 1 or C]
        positive = targets[:, None] == np.arange(1 if num_classes == 2 else 0, num_classes)  # [n, 1 or C]
        return {
            "loss": mean_loss(loss, offsets),
            "accuracy": ratio(tp.sum(1), np.diff(offsets)),
            "balanced_accuracy": mean_of_defined(ratio(tp, l)),
            "f1": mean_of_defined(ratio(2 * tp, p + l)),
            "auc": mean_of_defined(area_under_roc(odds, positive, offsets)),
        }

    def _loss_of(self, logits: Tensor, y: Tensor, allowed: Tensor | None) -> Tensor:
        """Per-sample loss, each sample as a batch of one where classes are masked.  # [n]"""
        if not len(logits):
            return logits.new_zeros(0)
        if allowed is None:
            return self.loss(logits, y)
        return self.loss(logits[:, None], y[:, None], allowed.to(logits.device))[:, 0]


def check_labels(targets: np.ndarray, num_classes: int, dimensions: int, kind: str) -> None:
    """Refuse targets that are no int64 class numbers from 0 to C - 1, of so many dimensions."""
    require(num_classes >= 2, f"the data set has {num_classes} class(es), expected at least 2")
    require(targets.dtype == np.int64, f"targets have dtype {targets.dtype}, expected int64")
    require(
        targets.ndim == dimensions,
        f"targets of {kind} have shape {targets.shape}, expected {dimensions} dimension(s)",
    )
    require(
        int(targets.min()) >= 0 and int(targets.max()) < num_classes,
        f"labels span {int(targets.min())} to {int(targets.max())}, expected 0 to {num_classes - 1}",
    )


def mask_logits(logits: Tensor, class_mask: Tensor | None, value: float = float("-inf")) -> Tensor:
    """Logits [k, B, C] with the classes a client does not have, class_mask [k, C] False, set to value."""
    return logits if class_mask is None else logits.masked_fill(~class_mask.unsqueeze(-2), value)


def _uniform_loss(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Cross-entropy with the uniform distribution over a client's classes.  # [..., B]"""
    log_p = logits.log_softmax(-1)
    if class_mask is None:
        return -log_p.mean(-1)
    allowed = class_mask.unsqueeze(-2)
    return -log_p.masked_fill(~allowed, 0).sum(-1) / allowed.sum(-1)


def _is_narrow(z: Tensor) -> bool:
    """Whether logits z [n, C] are better handled with samples along the rows of the vector unit: on a CPU 1.1 times as
    fast at n = 200, 4 times at n = 1,000, C = 10; a third as fast at C = 62."""
    return z.device.type == "cpu" and z.shape[1] <= 32 and len(z) >= 192


class _NarrowCrossEntropy(torch.autograd.Function):
    """Cross-entropy [n] of logits [n, C], computed on [C, n]: 2.3 times as fast on a CPU at n = 1,000, C = 10 (forward
    and backward)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        log_p = z.t().contiguous().log_softmax(0)  # [C, n]
        ctx.save_for_backward(log_p, y)
        return -log_p.gather(0, y[None])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_p, y = ctx.saved_tensors
        grad = (log_p.exp() * grads[0]).scatter_add(0, y[None], -grads[0][None])  # [C, n]
        return grad.t(), None
