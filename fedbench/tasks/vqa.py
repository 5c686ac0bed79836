"""Answers to questions about pictures, from a list of answers that every client has for itself."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._counts import f1_flat, sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, Training, check_primary, mean_loss, ratio
from fedbench.tasks.classification import mask_logits


class VQA(Task):
    """y [..., B, 2] int64: the answer's number in the client's list, -1 outside of it, and whether the question is
    closed; logits [..., B, C], of which a client has its own first ones (class_mask).

    loss: bce_sum, the binary cross-entropy summed over the client's answers (FedDAT), or cross_entropy.  f1: whether
    micro_f1 and f1_flat are recorded.  primary: the score to go by.
    """

    kind = "vqa"
    primary = "accuracy"
    higher_is_better = {
        "loss": False,
        **dict.fromkeys(("accuracy", "accuracy_open", "accuracy_closed", "ceiling"), True),
    }
    fractions = frozenset(("accuracy", "accuracy_open", "accuracy_closed", "ceiling", "micro_f1", "f1_flat"))

    def __init__(
        self, loss: Literal["bce_sum", "cross_entropy"] = "bce_sum", f1: bool = False, primary: str = "accuracy"
    ):
        require(loss in ("bce_sum", "cross_entropy"), f"task.loss must be one of bce_sum, cross_entropy, got {loss}")
        self.loss_name, self.f1 = loss, f1
        if f1:
            self.higher_is_better = {**type(self).higher_is_better, "micro_f1": True, "f1_flat": True}
        self.primary = check_primary(primary, self)

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but int64 [n, 2] of an answer, -1 to C - 1, and 0 or 1."""
        require(num_classes >= 2, f"the data set has {num_classes} answer(s), expected at least 2")
        fits = targets.ndim == 2 and targets.shape[1:] == (2,) and targets.dtype == np.int64
        require(fits, f"targets of vqa are {targets.dtype} {targets.shape}, expected int64 [n, 2]")
        low, high = int(targets[:, 0].min()), int(targets[:, 0].max())
        require(low >= -1 and high < num_classes, f"answers span {low} to {high}, expected -1 to {num_classes - 1}")
        require(bool(np.isin(targets[:, 1], (0, 1)).all()), "whether a question is closed must be 0 or 1")

    def setup(self, federation: Training) -> None:
        """The length of the longest list."""
        self.num_answers = federation.num_classes

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """The answers, 0 for those outside of the list."""
        return targets[:, 0].clip(0)

    def example(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray:
        """Targets [n, 2]: a tenth of the answers is in no list."""
        answer = np.where(rng.random(n) < 0.1, -1, rng.integers(0, num_classes, n))
        return np.stack([answer, rng.integers(0, 2, n)], 1).astype(np.int64)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Over the client's answers; to an answer outside of the list all of them are wrong, or (cross_entropy) equally
        right.  # [..., B]"""
        answer = y[..., 0]
        hot = F.one_hot(answer.clamp_min(0), logits.shape[-1]).to(logits.dtype) * (answer >= 0)[..., None]
        own = torch.ones_like(hot) if class_mask is None else class_mask.unsqueeze(-2).to(hot.dtype).expand_as(hot)
        if self.loss_name == "bce_sum":
            return (F.binary_cross_entropy_with_logits(logits, hot, reduction="none") * own).sum(-1)
        share = torch.where((answer >= 0)[..., None], hot, own / own.sum(-1, keepdim=True))
        log_p = mask_logits(logits, class_mask).log_softmax(-1)
        return -torch.where(share > 0, log_p * share, 0).sum(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """hit: whether the largest logit is the answer's.  With f1 also tp, answers that are predicted (logit > 0) and
        right, and p, predicted."""
        answer = y[..., 0]
        kept = {
            "loss": self.loss(logits, y, class_mask),
            "hit": mask_logits(logits, class_mask).argmax(-1) == answer,
            "known": answer >= 0,
            "closed": y[..., 1] > 0,
        }
        if self.f1:
            predicted = mask_logits(logits, class_mask) > 0  # [k, b, C]
            right = predicted.gather(-1, answer.clamp_min(0)[..., None])[..., 0] & (answer >= 0)
            kept |= {"tp": right, "p": predicted.sum(-1)}
        return kept

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """accuracy, accuracy_open and accuracy_closed: of questions, NaN where a client has none.  ceiling: the share
        whose answer is in the list at all.  micro_f1, f1_flat: of yes or no to each answer of the list, the latter also
        with "no" as a class, the two weighted by how often they are true (what FedPIA's Table 4 may print)."""
        hit, known, closed = (statistics[name].cpu().numpy().astype(np.float64) for name in ("hit", "known", "closed"))
        columns = np.stack([np.ones_like(hit), closed, hit, hit * closed, known], 1)
        n, num_closed, hits, closed_hits, answerable = sum_by_client(columns, offsets).T  # [N] each
        scores = {
            "loss": mean_loss(statistics["loss"], offsets),
            "accuracy": ratio(hits, n),
            "accuracy_open": ratio(hits - closed_hits, n - num_closed),
            "accuracy_closed": ratio(closed_hits, num_closed),
            "ceiling": ratio(answerable, n),
        }
        return scores | (self._f1_scores(statistics, offsets, class_mask, answerable) if self.f1 else {})

    def _f1_scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None, true: np.ndarray
    ) -> dict[str, np.ndarray]:
        """true [N]: right answers that there are in the lists."""
        tp, p = sum_by_client(
            np.stack([statistics[x].cpu().numpy().astype(np.float64) for x in ("tp", "p")], 1), offsets
        ).T
        answers = np.full(len(tp), self.num_answers, np.float64) if class_mask is None else class_mask.sum(1)
        cells = answers * np.diff(offsets)  # [N], questions by answers
        return {"micro_f1": ratio(2 * tp, p + true), "f1_flat": f1_flat(tp, p, true, cells)}
