"""A class for every pixel: cross-entropy, Dice loss, or both."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import NonNegativeInt, require
from fedbench.tasks._counts import mean_of_defined, sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, Training, check_primary, mean_loss, ratio

OUTSIDE = (-1, 255)  # labels of pixels that belong to no class


class Segmentation(Task):
    """y [..., B, H, W] int64, logits [..., B, C, H, W].

    loss: ce, the mean cross-entropy of pixels; dice, 1 - the mean over classes of the soft Dice coefficient of a
    sample, (2 sum p t + 1) / (sum p + sum t + 1); dice_ce, their sum.  ignore: a class whose pixels are in no loss and
    in no score (labels outside 0 to C - 1 never are).  empty: what the Dice and IoU of a class are where a client has
    no pixel of it, true or predicted: skip (left out of the mean), one, or zero.  per_class: whether dice and iou are
    recorded of each class too, as dice_class1.  primary: the score to go by.
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
        require(loss in ("ce", "dice", "dice_ce"), f"task.loss must be one of ce, dice, dice_ce, got {loss}")
        require(empty in ("skip", "one", "zero"), f"task.empty must be one of skip, one, zero, got {empty}")
        self.loss_name, self.ignore, self.empty, self.per_class = loss, ignore, empty, per_class
        self.primary = check_primary(primary, self)
        self.some_ignored = True  # until setup has seen the targets

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but uint8 or int64 [n, H, W] of classes 0 to C - 1, -1 or 255."""
        require(num_classes >= 2, f"the data set has {num_classes} class(es), expected at least 2")
        whole = targets.dtype in (np.uint8, np.int64)
        require(whole, f"targets have dtype {targets.dtype}, expected uint8 or int64")
        require(targets.ndim == 3, f"targets of {self.kind} have shape {targets.shape}, expected 3 dimension(s)")
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= num_classes:
            present = [int(label) for label in np.unique(targets) if label not in OUTSIDE]
            low, high = (present[0], present[-1]) if present else (0, 0)
        require(low >= 0 and high < num_classes, f"labels span {low} to {high}, expected 0 to {num_classes - 1}")
        require(
            self.ignore is None or self.ignore < num_classes,
            f"task.ignore={self.ignore} is none of the data set's {num_classes} classes, 0 to {num_classes - 1}",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """The most frequent class other than 0, 0 where a mask shows nothing else."""
        masks = targets.reshape(len(targets), -1)  # [n, pixels]
        counts = np.stack([(masks == c).sum(1) for c in range(1, num_classes)], 1)
        return np.where(counts.any(1), counts.argmax(1) + 1, 0).astype(np.int64)

    def setup(self, federation: Training) -> None:
        """Find out once whether any pixel is to be ignored, and name the scores of each class."""
        counted = (self._counted(some, federation.num_classes).all() for some in federation.targets.split(256))
        self.some_ignored = not all(bool(each) for each in counted)
        if self.per_class:
            names = [f"{score}_class{c}" for score in ("dice", "iou") for c in self._classes(federation.num_classes)]
            self.higher_is_better = {**type(self).higher_is_better, **dict.fromkeys(names, True)}
            self.fractions = type(self).fractions | set(names)

    def _classes(self, num_classes: int) -> list[int]:
        return [c for c in range(num_classes) if c != self.ignore]

    def _counted(self, y: Tensor, num_classes: int) -> Tensor:
        """Which pixels count.  # bool, as y"""
        inside = (y >= 0) & (y < num_classes)
        return inside if self.ignore is None else inside & (y != self.ignore)

    def class_counts(self, y: Tensor, num_classes: int) -> Tensor:
        """Pixels of each class, of those that count.  # [n, C]"""
        counted = self._counted(y, num_classes)
        return F.one_hot(y.long().where(counted, 0), num_classes).mul_(counted[..., None]).sum((1, 2))

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """A logit for every class and pixel."""
        return len(y), outputs, *y.shape[1:]

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Of each sample, over its pixels that count.  # [..., B]"""
        z = _masked(logits, class_mask).reshape(-1, *logits.shape[-3:])  # [n, C, H, W]
        target, counted = y.reshape(-1, *y.shape[-2:]), None  # [n, H, W]
        if self.some_ignored:
            counted = self._counted(target, z.shape[1])
            target = target.where(counted, 0)
        each = z.new_zeros(len(z))
        if self.loss_name != "dice":
            each = each + _cross_entropy(z, target, counted)
        if self.loss_name != "ce":
            each = each + self._dice_loss(z, target, counted, class_mask)
        return each.view(y.shape[:-2])

    def _dice_loss(self, z: Tensor, y: Tensor, counted: Tensor | None, class_mask: Tensor | None) -> Tensor:
        """1 - the mean over classes of the soft Dice coefficient.  z [n, C, H, W], y and counted [n, H, W].  # [n]"""
        p, t = z.softmax(1), F.one_hot(y, z.shape[1]).movedim(-1, 1).to(z.dtype)  # [n, C, H, W]
        if counted is not None:
            p, t = p * counted[:, None], t * counted[:, None]
        dice = (2 * (p * t).sum((2, 3)) + 1) / (p.sum((2, 3)) + t.sum((2, 3)) + 1)  # [n, C]
        which = torch.ones_like(dice)
        if class_mask is not None:
            which = class_mask.repeat_interleave(len(z) // len(class_mask), 0).to(dice.dtype)
        if self.ignore is not None:
            which[:, self.ignore] = 0
        return 1 - (dice * which).sum(1) / which.sum(1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Pixels of each sample and class: tp, predicted c and truly c; p, predicted; l, truly c.  # each [k, b, C]"""
        z = _masked(logits, class_mask)
        k, b, num_classes = z.shape[:3]
        truth, predicted = y.reshape(k * b, -1), z.argmax(2).reshape(k * b, -1)  # [n, pixels]
        counted = self._counted(truth, num_classes)
        row = torch.arange(k * b, device=z.device)[:, None] * num_classes

        def count(cell: Tensor, which: Tensor) -> Tensor:
            found = z.new_zeros(k * b * num_classes, dtype=torch.int64)
            cells = (row + cell.where(which, 0)).flatten()
            return found.scatter_add_(0, cells, which.flatten().long()).view(k, b, num_classes)

        hit = counted & (truth == predicted)
        sums = {"tp": count(truth, hit), "p": count(predicted, counted), "l": count(truth, counted)}
        return {"loss": self.loss(logits, y, class_mask), **sums}

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Scores from a client's pixels per class, summed over its samples.

        accuracy: of pixels.  iou, dice: the Jaccard index and the Dice coefficient, mean over classes (see `empty`).
        dice_iou: pFedNet's "IoU", d / (2 - d) for the Dice coefficient d of all classes pooled (d is the pixel accuracy
        where every pixel is labelled).  label_iou: the same sums without class 0, the background.  label_iou_majority:
        without the class that has most true pixels, which is what pFedNet's released code excludes.
        """
        tp, p, l = (sum_by_client(statistics[name].cpu().numpy(), offsets) for name in ("tp", "p", "l"))  # noqa: E741
        num_classes = tp.shape[1]
        empty = {"skip": np.nan, "one": 1.0, "zero": 0.0}[self.empty]
        here = np.diff(offsets)[:, None] > 0  # [N, 1]
        iou, dice = ratio(tp, p + l - tp), ratio(2 * tp, p + l)  # [N, C]
        iou, dice = (np.where(np.isnan(each) & here, empty, each) for each in (iou, dice))
        if self.ignore is not None:
            iou[:, self.ignore] = dice[:, self.ignore] = np.nan

        def pooled(which: np.ndarray) -> np.ndarray:
            hits, union = (tp * which).sum(1), ((p + l - tp) * which).sum(1)  # [N]
            return ratio(hits, union)  # d / (2 - d) of d = 2 TP / (P + L), written out

        classes = np.arange(num_classes)
        scores = {
            "loss": mean_loss(statistics["loss"], offsets),
            "accuracy": ratio(tp.sum(1), l.sum(1)),
            "iou": mean_of_defined(iou),
            "dice": mean_of_defined(dice),
            "dice_iou": pooled(np.ones((1, num_classes))),
            "label_iou": pooled(classes[None] != 0),
            "label_iou_majority": pooled(classes[None] != l.argmax(1)[:, None]),
        }
        for c in self._classes(num_classes) if self.per_class else ():
            scores |= {f"dice_class{c}": dice[:, c], f"iou_class{c}": iou[:, c]}
        return scores


def _masked(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """logits [k, B, C, H, W] without the classes a client does not have, class_mask [k, C] False."""
    return logits if class_mask is None else logits.masked_fill(~class_mask[:, None, :, None, None], float("-inf"))


def _cross_entropy(z: Tensor, y: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the pixels that count (None: all).  z [n, C, H, W], y [n, H, W].  # [n]"""
    each = F.cross_entropy(z, y, reduction="none")  # [n, H, W]
    if counted is None:
        return each.mean((-2, -1))
    return each.where(counted, 0).sum((-2, -1)) / counted.sum((-2, -1)).clamp_min(1)
