"""Semantic segmentation.  Letters: k clients with B images [H, W] each, C classes; n images of all N clients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import NonNegativeInt, require
from fedbench.tasks._metrics import nan_mean, sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, TrainingData, check_primary, mean_loss, ratio
from fedbench.tasks.classification import require_two_classes

VOID_LABELS = (-1, 255)  # values of pixels without a class in common data sets


class Segmentation(Task):
    """Loss of masks [..., B, H, W] int64 and logits [..., B, C, H, W].

    Args:
        loss: ce, the mean cross-entropy of pixels; dice, 1 - the mean soft Dice coefficient of a sample over classes,
            (2 sum p t + 1) / (sum p + sum t + 1), where p is the probability of a class in a pixel and t is 1 for the
            true class; dice_ce, the sum of both.
        ignore: A class whose pixels are excluded from loss and metrics.  Pixels with a label outside 0 to C - 1 are
            always excluded.
        empty: The Dice coefficient and IoU of a class that is in no true or predicted mask of a client: one, zero, or
            skip, which leaves the class out of the client's mean.
        per_class: Whether to record Dice and IoU of each class as well, for example dice_class1.
        primary: Metric that selects the best round and is shown in tables.
    """

    kind = "segmentation"
    primary = "accuracy"
    higher_is_better = {
        "loss": False,
        **dict.fromkeys(("accuracy", "iou", "dice", "dice_iou", "label_iou", "label_iou_majority"), True),
    }
    fractions = frozenset(("accuracy", "iou", "dice", "dice_iou", "label_iou", "label_iou_majority"))

    def __init__(
        self,
        loss: Literal["ce", "dice", "dice_ce"] = "ce",
        ignore: NonNegativeInt | None = None,
        empty: Literal["skip", "one", "zero"] = "skip",
        per_class: bool = False,
        primary: str = "accuracy",
    ):
        require(
            loss in ("ce", "dice", "dice_ce"),
            f"task.loss={loss} is not a loss of segmentation: set ce, dice or dice_ce",
        )
        require(empty in ("skip", "one", "zero"), f"task.empty={empty} is not allowed: set skip, one or zero")
        self.loss_name = loss
        self.ignore = ignore
        self.empty = empty
        self.per_class = per_class
        self.primary = check_primary(primary, self)
        self.has_ignored_pixels = True  # `setup` sets it to False if there are none, which makes the loss faster

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are masks [n, H, W], uint8 or int64, of 0 to C - 1 and VOID_LABELS.

        These, -1 and 255, stand for pixels without a class.
        """
        require_two_classes(num_classes, self.kind)
        require(
            targets.dtype in (np.uint8, np.int64),
            f"the targets of task={self.kind} have dtype {targets.dtype}, expected uint8 or int64: convert the masks "
            "by targets.astype(np.int64)",
        )
        require(
            targets.ndim == 3,
            f"the targets of task={self.kind} have shape {targets.shape}, expected 3 dimensions, [samples, height, "
            "width]: store one mask per sample, with the class of each pixel",
        )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= num_classes:  # slow, so only if there are labels outside of the classes
            present = [int(label) for label in np.unique(targets) if label not in VOID_LABELS]
            low, high = (present[0], present[-1]) if present else (0, 0)
        require(
            low >= 0 and high < num_classes,
            f"the labels span {low} to {high}, expected 0 to {num_classes - 1}: number the {num_classes} classes from "
            "0, and store 255 for pixels without a class",
        )
        require(
            self.ignore is None or self.ignore < num_classes,
            f"task.ignore={self.ignore} is not a class of the data set: set a class from 0 to "
            f"{num_classes - 1}, or null to ignore none",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return one label per mask: its most frequent class, leaving out class 0, the background.  # [n] int64

        The label is 0 for a mask without other classes.

        Args:
            targets: The masks.  # [n, H, W]
            num_classes: C.
        """
        masks = targets.reshape(len(targets), -1)  # [n, pixels]
        counts = np.stack([(masks == c).sum(1) for c in range(1, num_classes)], 1)  # [n, C - 1]
        return np.where(counts.any(1), counts.argmax(1) + 1, 0).astype(np.int64)

    def setup(self, federation: TrainingData) -> None:
        """Set `has_ignored_pixels`: whether any mask of any client has a pixel that loss and metrics leave out.

        With the option per_class, also add the metrics dice_class1, iou_class1 and so on to `higher_is_better`.
        """
        chunks = federation.targets.split(256)  # 256 samples at a time, which limits memory
        self.has_ignored_pixels = not all(bool(self._is_valid(y, federation.num_classes).all()) for y in chunks)
        if self.per_class:
            names = [f"{score}_class{c}" for score in ("dice", "iou") for c in self._classes(federation.num_classes)]
            self.higher_is_better = {**type(self).higher_is_better, **dict.fromkeys(names, True)}
            self.fractions = type(self).fractions | set(names)

    def _classes(self, num_classes: int) -> list[int]:
        """Return the classes 0 to num_classes - 1, without the class `self.ignore` if it is not None."""
        return [c for c in range(num_classes) if c != self.ignore]

    def _is_valid(self, y: Tensor, num_classes: int) -> Tensor:
        """Return whether each pixel of masks y [..., H, W] counts in loss and metrics.  # [..., H, W] bool

        Pixels without a class (outside 0 to num_classes - 1) and of the class of the option ignore do not.
        """
        has_class = (y >= 0) & (y < num_classes)
        return has_class if self.ignore is None else has_class & (y != self.ignore)

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor:
        """Return how many pixels of each mask y [n, H, W] have each of C = num_classes classes.  # [n, C] int64

        Ignored pixels are not counted.
        """
        valid = self._is_valid(y, num_classes)
        # ignored pixels count as class 0 at first, and are then multiplied by 0
        return F.one_hot(y.long().where(valid, 0), num_classes).mul_(valid[..., None]).sum((1, 2))

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of the logits for masks y [B, H, W]: (B, outputs, H, W), where outputs is C."""
        return len(y), outputs, *y.shape[1:]

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the loss of each sample over its pixels that are not ignored.  # [..., B]

        The option loss (``loss_name``) selects the cross-entropy "ce", the Dice loss "dice" or their sum "dice_ce".

        Args:
            logits: Outputs of the model, [..., B, C, H, W].
            y: Targets, [..., B, H, W].
            class_mask: The classes of each client, [k, C] bool.  None: all.
        """
        z = _masked(logits, class_mask).reshape(-1, *logits.shape[-3:])  # [n, C, H, W]
        target = y.reshape(-1, *y.shape[-2:])  # [n, H, W]
        valid = None
        if self.has_ignored_pixels:
            valid = self._is_valid(target, z.shape[1])
            target = target.where(valid, 0)  # any class: these pixels do not count
        total = z.new_zeros(len(z))
        if self.loss_name != "dice":
            total = total + _cross_entropy(z, target, valid)
        if self.loss_name != "ce":
            total = total + self._dice_loss(z, target, valid, class_mask)
        return total.view(y.shape[:-2])

    def _dice_loss(self, z: Tensor, y: Tensor, valid: Tensor | None, class_mask: Tensor | None) -> Tensor:
        """Return 1 - the mean soft Dice coefficient over the classes of each sample.

        Args:
            z: Logits, [n, C, H, W], with n = k B.
            y: Classes, [n, H, W], 0 where a pixel is not valid.
            valid: Whether a pixel counts, [n, H, W] bool.  None: all.
            class_mask: The classes of each client, [k, C] bool.  None: all.

        Returns:
            Losses, [n].
        """
        p = z.softmax(1)  # [n, C, H, W]
        t = F.one_hot(y, z.shape[1]).movedim(-1, 1).to(z.dtype)  # [n, C, H, W], 1 for the true class
        if valid is not None:
            p, t = p * valid[:, None], t * valid[:, None]
        # 1 is added to both, so that a class in neither mask has the coefficient 1
        dice = (2 * (p * t).sum((2, 3)) + 1) / (p.sum((2, 3)) + t.sum((2, 3)) + 1)  # [n, C]
        included = torch.ones_like(dice)  # 0 for classes that the mean leaves out
        if class_mask is not None:
            included = class_mask.repeat_interleave(len(z) // len(class_mask), 0).to(dice.dtype)
        if self.ignore is not None:  # the class that the option ignore leaves out
            included[:, self.ignore] = 0
        return 1 - (dice * included).sum(1) / included.sum(1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return "loss" [k, B], and the number of pixels of each class in each sample, [k, B, C] each.

        - tp: correctly predicted pixels of the class (true positives).
        - p: pixels that are predicted to have the class.
        - true: pixels that have the class.

        Args:
            logits: Outputs of the model, [k, B, C, H, W].
            y: Targets, [k, B, H, W].
            class_mask: The classes of each client, [k, C] bool.  None: all.
        """
        z = _masked(logits, class_mask)
        k, b, num_classes = z.shape[:3]
        target = y.reshape(k * b, -1)  # [n, pixels]
        predicted = z.argmax(2).reshape(k * b, -1)  # [n, pixels]
        valid = self._is_valid(target, num_classes)
        first_count = torch.arange(k * b, device=z.device)[:, None] * num_classes  # index of class 0 of sample i: i * C

        def count(classes: Tensor, is_counted: Tensor) -> Tensor:
            """Return how many pixels of each sample have each class.

            Args:
                classes: Class of each pixel, [n, pixels].
                is_counted: Whether a pixel counts, [n, pixels] bool.

            Returns:
                Counts, [k, B, C] int64.
            """
            # One histogram for all n = k B samples: class c of sample i has the index i * C + c.
            counts = z.new_zeros(k * b * num_classes, dtype=torch.int64)
            index = (first_count + classes.where(is_counted, 0)).flatten()  # first_count is i * C
            return counts.scatter_add_(0, index, is_counted.flatten().long()).view(k, b, num_classes)

        return {
            "loss": self.loss(logits, y, class_mask),
            "tp": count(target, valid & (target == predicted)),
            "p": count(predicted, valid),
            "true": count(target, valid),
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each, from its pixels of each class, summed over samples.

        - loss: mean over the client's samples.
        - accuracy: fraction of correctly classified pixels.
        - iou, dice: Jaccard index and Dice coefficient, mean over classes.
          The option task.empty sets them for a class in no mask of a client.
        - dice_iou: pFedNet's "IoU": d / (2 - d) for the Dice coefficient d of all classes pooled.
        - label_iou: dice_iou without class 0, the background.
        - label_iou_majority: dice_iou without the class that has the most true pixels, as in pFedNet's released code.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The classes of each client, [N, C] bool.  None: all.
        """
        tp, p, true = (sum_by_client(statistics[name].cpu().numpy(), offsets) for name in ("tp", "p", "true"))
        num_classes = tp.shape[1]
        union = p + true - tp
        score_if_absent = {"skip": np.nan, "one": 1.0, "zero": 0.0}[self.empty]  # of a class in no mask of a client
        has_samples = np.diff(offsets)[:, None] > 0  # [N, 1]
        per_class = {"dice": ratio(2 * tp, p + true), "iou": ratio(tp, union)}  # [N, C] each
        for name, score in per_class.items():
            per_class[name] = np.where(np.isnan(score) & has_samples, score_if_absent, score)
            if self.ignore is not None:
                per_class[name][:, self.ignore] = np.nan

        def pooled(included: np.ndarray) -> np.ndarray:
            """Return the IoU of each client with the pixels of several classes added up.  # [N]

            It equals d / (2 - d) for the Dice coefficient d of the added pixels.  tp and union [N, C] are the pixels in
            the intersection and in the union of predicted and true masks.

            Args:
                included: The classes to include, [N, C] bool or [1, C] for the same in all clients.
            """
            return ratio((tp * included).sum(1), (union * included).sum(1))

        classes = np.arange(num_classes)
        scores = {
            "loss": mean_loss(statistics["loss"], offsets),
            "accuracy": ratio(tp.sum(1), true.sum(1)),
            "iou": nan_mean(per_class["iou"]),
            "dice": nan_mean(per_class["dice"]),
            "dice_iou": pooled(np.ones((1, num_classes))),
            "label_iou": pooled(classes[None] != 0),
            "label_iou_majority": pooled(classes[None] != true.argmax(1)[:, None]),
        }
        if self.per_class:
            for c in self._classes(num_classes):
                scores |= {f"{name}_class{c}": score[:, c] for name, score in per_class.items()}
        return scores


def _masked(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Return logits with -inf for the classes that a client does not have.

    Args:
        logits: Outputs of the model, [k, B, C, H, W].
        class_mask: The classes of each client, [k, C] bool.  None: all, and the logits are returned unchanged.
    """
    return logits if class_mask is None else logits.masked_fill(~class_mask[:, None, :, None, None], float("-inf"))


def _cross_entropy(z: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean cross-entropy of the valid pixels of each sample.

    Args:
        z: Logits, [n, C, H, W].
        y: Classes, [n, H, W], 0 where a pixel is not valid.
        valid: Whether a pixel counts, [n, H, W] bool.  None: all.

    Returns:
        Means, [n], 0 for a sample without valid pixels.
    """
    losses = F.cross_entropy(z, y, reduction="none")  # [n, H, W]
    if valid is None:
        return losses.mean((-2, -1))
    return losses.where(valid, 0).sum((-2, -1)) / valid.sum((-2, -1)).clamp_min(1)
