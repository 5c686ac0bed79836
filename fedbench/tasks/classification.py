"""Classification by cross-entropy.  Letters: k clients with B samples each, C classes; n samples of all N clients."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import Positive, UnitInterval, require
from fedbench.tasks._metrics import client_of_sample, count_by_class, log_odds, nan_mean, roc_auc
from fedbench.tasks.base import SampleStatistics, Task, TrainingData, check_primary, mean_loss, ratio


class Classification(Task):
    """Cross-entropy of targets [..., B] int64 and logits [..., B, C].  class_weights: factors of the loss by class.

    Args:
        class_weights: Factor of a sample's loss by its class.  "none": 1.  "balanced": n / (C n_c), where n_c of the n
            training samples of all clients have class c, and C counts the classes with training samples.  Or a list of
            one factor per class.
        label_smoothing: Fraction of a target's probability that is distributed evenly over the client's classes.
        primary: Metric that selects the best round and is shown in tables.
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
            f"task.class_weights={class_weights} is not allowed: set none, balanced or a list with one number > 0 "
            "per class",
        )
        require(
            0 <= label_smoothing < 1,
            f"task.label_smoothing must be at least 0 and below 1, got {label_smoothing}: set 0 for no smoothing",
        )
        require(
            isinstance(class_weights, str) or all(weight > 0 for weight in class_weights),
            f"task.class_weights must be numbers > 0, got {class_weights}: replace those <= 0, for example by 1",
        )
        self.class_weights = class_weights
        self.label_smoothing = label_smoothing
        self.primary = check_primary(primary, self)
        self.weights: Tensor | None = None  # [C], None: no weights
        uses_plain_loss = class_weights == "none" and not label_smoothing
        # A subclass that overrides `loss` has another gradient.
        self.has_closed_form_gradient = uses_plain_loss and type(self).loss is Classification.loss

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are int64 labels [n] from 0 to C - 1, with C = num_classes.

        Also raise it if the option class_weights is a list of another length than C.
        """
        check_labels(targets, num_classes, self.kind)
        # class_weights is "none", "balanced" or a list
        count = num_classes if isinstance(self.class_weights, str) else len(self.class_weights)
        require(
            count == num_classes,
            f"task.class_weights has {count} values, but the data set has {num_classes} classes: list one number > 0 "
            "per class, or set balanced or none",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the targets [n] int64 unchanged: they are the class labels.  num_classes is not used."""
        return targets

    def setup(self, federation: TrainingData) -> None:
        """Set ``weights`` [C] from the option class_weights; leave it unchanged for "none".

        The option is a list, or "balanced": inversely proportional to the number of all clients' training samples of
        the class, and 1 for a class without any.
        """
        if self.class_weights == "none":
            return
        if self.class_weights == "balanced":
            y = federation.targets.cpu().numpy()[federation.splits["train"].indices]
            count = np.bincount(y, minlength=federation.num_classes)  # [C]
            num_present = np.count_nonzero(count)  # classes that have training samples
            weights = np.where(count > 0, len(y) / (num_present * np.maximum(count, 1)), 1.0)  # 1 for absent classes
        else:
            weights = np.asarray(self.class_weights, np.float64)
        self.weights = torch.from_numpy(weights).float().to(federation.device)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each sample, with label smoothing and class weights if set.  # [..., B]

        Args:
            logits: Outputs of the model, [..., B, C].
            y: Targets, [..., B].
            class_mask: The classes of each client, [k, C] bool.  None: all.
        """
        masked = mask_logits(logits, class_mask)
        z = masked.reshape(-1, logits.shape[-1])  # [n, C]
        labels = y.reshape(-1)  # [n]
        if _is_faster_transposed(z):  # the same loss, computed on z.t() [C, n]
            loss = _TransposedCrossEntropy.apply(z, labels).view(y.shape)
        else:
            loss = F.cross_entropy(z, labels, reduction="none").view(y.shape)  # [..., B]
        if self.label_smoothing:
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * _uniform_loss(masked, class_mask)
        return loss if self.weights is None else loss * self.weights[y]

    def loss_and_gradient(
        self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [k, B], and the gradient of sum(weight * loss) with respect to the logits [k, B, C].

        Without class weights, label smoothing and a subclass's loss (has_closed_form_gradient), the gradient is weight
        * (softmax - one-hot).  Otherwise autograd computes it.

        Args:
            logits: Outputs of the model, [k, B, C].
            y: Targets, [k, B].
            weight: Weight of each sample, [k, B].
            class_mask: The classes of each client, [k, C] bool.  None: all.
        """
        if not self.has_closed_form_gradient:
            return super().loss_and_gradient(logits, y, weight, class_mask)
        z = mask_logits(logits, class_mask).reshape(-1, logits.shape[-1])  # [n, C], n = k B
        label, factor = y.reshape(-1, 1), weight.reshape(-1, 1)  # [n, 1]
        transposed = _is_faster_transposed(z)
        if transposed:  # the same computation with classes as rows
            z, label, factor = z.t().contiguous(), label.t(), factor.t()  # [C, n], [1, n], [1, n]
        class_axis = 0 if transposed else 1
        log_p = z.log_softmax(class_axis)
        loss = -log_p.gather(class_axis, label)
        grad = log_p.exp_().mul_(factor).scatter_add_(class_axis, label, -factor)  # in place, to save memory
        return loss.view(y.shape), (grad.t() if transposed else grad).view(logits.shape)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return the "logits" [k, B, C], -inf for classes a client does not have, and the targets "y" [k, B].

        The ROC AUC needs the logits of all samples of a client.
        """
        return {"logits": mask_logits(logits, class_mask), "y": y}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - loss: mean over the client's samples.
        - accuracy: fraction of correctly classified samples.
        - balanced_accuracy: mean recall over the classes of the client's targets.
        - f1: macro average over the classes that occur in the client's targets or predictions.
        - auc: area under the ROC curve of class 1 if C = 2.  Otherwise the macro average, one versus rest, over the
          classes that some but not all of the client's samples have.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The classes of each client, [N, C] bool.  None: all.
        """
        client = client_of_sample(offsets)
        allowed = None if class_mask is None else torch.from_numpy(class_mask)[client]  # [n, C]
        loss = self._sample_losses(statistics["logits"], statistics["y"], allowed)
        logits = statistics["logits"].float().cpu().numpy()  # [n, C]
        targets = statistics["y"].cpu().numpy()  # [n]
        num_clients = len(offsets) - 1
        num_classes = logits.shape[1]
        predicted = logits.argmax(1)  # [n]
        correct = predicted == targets
        tp = count_by_class(targets[correct], client[correct], num_clients, num_classes)  # [N, C], true positives
        p = count_by_class(predicted, client, num_clients, num_classes)  # [N, C], samples predicted as the class
        true = count_by_class(targets, client, num_clients, num_classes)  # [N, C], samples of the class
        if num_classes == 2:  # one ROC curve, of class 1; the difference of logits orders samples as its probability
            class_scores = logits[:, 1:] - logits[:, :1]  # [n, 1]
            positive = targets[:, None] == 1
        else:
            class_scores = log_odds(logits, predicted)  # [n, C], order samples as the probability of the class
            positive = targets[:, None] == np.arange(num_classes)
        return {
            "loss": mean_loss(loss, offsets),
            "accuracy": ratio(tp.sum(1), np.diff(offsets)),
            "balanced_accuracy": nan_mean(ratio(tp, true)),
            "f1": nan_mean(ratio(2 * tp, p + true)),
            "auc": nan_mean(roc_auc(class_scores, positive, offsets)),
        }

    def _sample_losses(self, logits: Tensor, y: Tensor, allowed: Tensor | None) -> Tensor:
        """Return the loss of each sample.

        Args:
            logits: Logits, [n, C].
            y: Targets, [n].
            allowed: The classes of the client of each sample, [n, C] bool.  None: all.

        Returns:
            Losses, [n].
        """
        if not len(logits):
            return logits.new_zeros(0)
        if allowed is None:
            return self.loss(logits, y)
        # A mask of `loss` is one for each client, so each sample is passed as a client with a batch of one.
        return self.loss(logits[:, None], y[:, None], allowed.to(logits.device))[:, 0]


def check_labels(targets: np.ndarray, num_classes: int, kind: str) -> None:
    """Check that targets are int64 labels [n] from 0 to C - 1.

    Args:
        targets: The targets.
        num_classes: C.
        kind: The kind of targets, for the message.

    Raises:
        ConfigError: The targets have another type or shape, a label is out of range, or there are fewer than 2 classes.
    """
    require_two_classes(num_classes, kind)
    require(
        targets.dtype == np.int64,
        f"the targets of task={kind} have dtype {targets.dtype}, expected int64: convert them by "
        "targets.astype(np.int64)",
    )
    require(
        targets.ndim == 1,
        f"the targets of task={kind} have shape {targets.shape}, expected 1 dimension, [samples]: store one label per "
        "sample, or choose the task of your targets",
    )
    require(
        int(targets.min()) >= 0 and int(targets.max()) < num_classes,
        f"the labels span {int(targets.min())} to {int(targets.max())}, expected 0 to {num_classes - 1}: number the "
        f"{num_classes} classes from 0, or correct num_classes of the data set",
    )


def require_two_classes(num_classes: int, kind: str) -> None:
    """Raise ConfigError if num_classes is below 2.  kind, such as "classification", is only for the message."""
    require(
        num_classes >= 2,
        f"the data set has num_classes={num_classes}, but {kind} needs at least 2 classes: add samples of another "
        "class, or choose another data set",
    )


def mask_logits(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Return logits with -inf for the classes that a client does not have, so that it never predicts them.

    Args:
        logits: Outputs of the model, [k, B, C].
        class_mask: The classes of each client, [k, C] bool.  None: all, and the logits are returned unchanged.
    """
    return logits if class_mask is None else logits.masked_fill(~class_mask.unsqueeze(-2), float("-inf"))


def _uniform_loss(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Return the cross-entropy of each sample with the uniform distribution over its client's classes.

    Args:
        logits: Logits, [..., B, C], -inf for classes that a client does not have.
        class_mask: The classes of each client, [k, C] bool.  None: all.

    Returns:
        Cross-entropies, [..., B].
    """
    log_p = logits.log_softmax(-1)
    if class_mask is None:
        return -log_p.mean(-1)
    allowed = class_mask.unsqueeze(-2)
    return -log_p.masked_fill(~allowed, 0).sum(-1) / allowed.sum(-1)  # masked first, as -inf * 0 is NaN


def _is_faster_transposed(z: Tensor) -> bool:
    """Return whether cross-entropy of logits z [n, C] is faster on the transposed logits [C, n].

    It is on a CPU with many samples and few classes, because the CPU can then vectorize over samples.  The limits, 32
    classes and 192 samples, are rough.
    """
    return z.device.type == "cpu" and z.shape[1] <= 32 and len(z) >= 192


class _TransposedCrossEntropy(torch.autograd.Function):
    """Cross-entropy [n] of logits [n, C] and labels [n], computed on the transposed logits [C, n]."""

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
