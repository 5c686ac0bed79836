"""Multi-label classification.  Letters: k clients with B samples each, C labels; n samples of all N clients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._metrics import client_of_sample, nan_mean, roc_auc, sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, check_primary, mean_loss, ratio


class MultiLabel(Task):
    """Binary cross-entropy of targets [..., B, C] float and logits [..., B, C], over a client's classes.

    A label is predicted if its logit is > 0.

    Args:
        loss: bce_mean (mean over the classes) or bce_sum (their sum, as in task=vqa and task=mixed).
        micro_f1: Whether to record the F1 over all labels together as well.
        sample_f1: Whether to record the mean F1 of the samples as well.
        primary: Metric that selects the best round and is shown in tables.
    """

    kind = "multilabel"
    predicts = "labels"
    primary = "accuracy"
    higher_is_better = {"loss": False, "accuracy": True, "f1": True, "auc": True}
    fractions = frozenset(("accuracy", "f1", "micro_f1", "sample_f1", "auc"))

    def __init__(
        self,
        micro_f1: bool = False,
        sample_f1: bool = False,
        primary: str = "accuracy",
        loss: Literal["bce_mean", "bce_sum"] = "bce_mean",
    ):
        self.micro_f1 = micro_f1
        self.sample_f1 = sample_f1
        self.loss_name = loss
        optional = {"micro_f1": micro_f1, "sample_f1": sample_f1}
        recorded = dict.fromkeys((name for name, is_recorded in optional.items() if is_recorded), True)
        self.higher_is_better = {**type(self).higher_is_better, **recorded}
        self.primary = check_primary(primary, self)

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are float32 [n, C] with C = num_classes >= 2."""
        require(
            num_classes >= 2,
            f"the data set has num_classes={num_classes}, but multilabel needs at least 2 labels: store a single "
            'yes-or-no label as 2 classes, with task="classification" in the Arrays of the data set',
        )
        fits = targets.ndim == 2 and targets.shape[1] == num_classes and targets.dtype == np.float32
        require(
            fits,
            f"the targets of task=multilabel have dtype {targets.dtype} and shape {targets.shape}, "
            f"expected float32 [n, {num_classes}]: store 1 or 0 for each of the n samples and {num_classes} labels",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the smallest index of a sample's labels, from targets [n, C]; C if it has no label.  # [n] int64"""
        positive = targets > 0  # [n, C]
        return np.where(positive.any(1), positive.argmax(1), num_classes).astype(np.int64)

    def class_totals(self, y: Tensor, num_classes: int) -> Tensor:
        """Return the number of samples that have each label, from targets y [n, C].  # [C] int64"""
        return (y > 0).sum(0)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the binary cross-entropy of each sample: the mean or sum over its client's classes.  # [..., B]

        It is the sum with the option loss=bce_sum (``loss_name``).

        Args:
            logits: Outputs of the model, [..., B, C].
            y: Targets, [..., B, C].
            class_mask: The labels of each client, [k, C] bool.  None: all.
        """
        bce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")  # [..., B, C]
        if class_mask is None:
            return bce.sum(-1) if self.loss_name == "bce_sum" else bce.mean(-1)
        mask = class_mask.unsqueeze(-2)
        total = (bce * mask).sum(-1)
        return total if self.loss_name == "bce_sum" else total / mask.sum(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return "loss" [k, B], "logits" [k, B, C] and the targets "y" [k, B, C] of each sample.

        The ROC AUC needs the logits of all samples of a client.
        """
        return {"loss": self.loss(logits, y, class_mask), "logits": logits, "y": y}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - loss: mean over the client's samples.
        - accuracy: fraction of correct decisions over all pairs of a sample and a label.
        - f1: macro average over the labels that are true or predicted for some sample.
        - auc: macro average over the labels that some but not all samples have.
        - micro_f1 (if the option is set): over all labels together.
        - sample_f1 (if the option is set): mean F1 of the samples with a true or predicted label.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The labels of each client, [N, C] bool.  None: all.
        """
        logits = statistics["logits"].float().cpu().numpy()  # [n, C]
        targets = statistics["y"].cpu().numpy() > 0.5  # [n, C]
        valid = np.ones_like(targets) if class_mask is None else class_mask[client_of_sample(offsets)]  # [n, C]
        predicted = logits > 0  # a probability above 0.5  [n, C]

        def count(is_counted: np.ndarray) -> np.ndarray:
            """Return for each client and label how many samples have True in is_counted [n, C].  # [N, C]

            Labels that a client does not have (class_mask) count 0.
            """
            return sum_by_client(is_counted & valid, offsets)

        tp = count(predicted & targets)  # true positives
        p = count(predicted)  # samples predicted to have the label
        true = count(targets)  # samples that have the label
        num_samples = count(np.ones_like(targets))  # all samples, for labels of the client
        auc = roc_auc(logits, targets, offsets)  # [N, C]
        scores = {
            "loss": mean_loss(statistics["loss"], offsets),
            "accuracy": ratio(count(predicted == targets).sum(1), num_samples.sum(1)),
            "f1": nan_mean(ratio(2 * tp, p + true)),
            "auc": nan_mean(auc if class_mask is None else np.where(class_mask, auc, np.nan)),
        }
        if self.micro_f1:
            scores["micro_f1"] = ratio(2 * tp.sum(1), (p + true).sum(1))
        if self.sample_f1:
            scores["sample_f1"] = _sample_f1(predicted & valid, targets & valid, offsets)
        return scores


def _sample_f1(predicted: np.ndarray, true: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the mean over each client's samples of their F1, which compares predicted and true labels.

    Args:
        predicted: Whether each label is predicted, [n, C] bool.
        true: Whether the sample has each label, [n, C] bool.
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].

    Returns:
        Means, [N].  Samples without true and predicted labels are left out; NaN if no sample remains.
    """
    f1 = ratio(2 * (predicted & true).sum(1), predicted.sum(1) + true.sum(1))  # [n]
    defined = ~np.isnan(f1)
    total, count = sum_by_client(np.stack([np.where(defined, f1, 0), defined], 1), offsets).T  # [N] each
    return ratio(total, count)
