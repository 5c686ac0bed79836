"""Clients that answer questions about pictures, beside clients that give them labels, each from a list of its own."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._counts import f1_flat, sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, check_primary, mean_loss, ratio
from fedbench.tasks.classification import mask_logits
from fedbench.tasks.multilabel import MultiLabel

LABELS, OPEN, CLOSED = 0, 1, 2  # what a sample asks for: labels, or the answer to an open or closed question
OF_QUESTIONS = ("accuracy", "accuracy_open", "accuracy_closed", "ceiling", "f1_flat")
OF_LABELS = ("f1", "sample_f1", "auc")


class Mixed(Task):
    """y [..., B, 1 + L] int64: LABELS, OPEN or CLOSED, then the numbers, in the client's list, of the labels that are
    true or of the answer (none where it is outside of the list), filled up with -1; logits [..., B, C], of which a
    client has its own first ones (class_mask).

    The loss of both is the binary cross-entropy, summed over the client's list.  One is predicted where its logit is
    > 0; answered is the largest.  primary: the score to go by.
    """

    kind = "mixed"
    primary = "micro_f1"
    higher_is_better = {"loss": False, **dict.fromkeys(("micro_f1", *OF_QUESTIONS, *OF_LABELS), True)}
    fractions = frozenset(("micro_f1", *OF_QUESTIONS, *OF_LABELS))

    def __init__(self, primary: str = "micro_f1"):
        self.primary = check_primary(primary, self)

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but int64 [n, 1 + L], of questions with one answer at most."""
        require(num_classes >= 2, f"the data set has {num_classes} class(es), expected at least 2")
        fits = targets.ndim == 2 and targets.shape[1] >= 2 and targets.dtype == np.int64
        require(fits, f"targets of mixed are {targets.dtype} {targets.shape}, expected int64 [n, 1 + L], L >= 1")
        asked, true = targets[:, 0], targets[:, 1:]
        require(bool(np.isin(asked, (LABELS, OPEN, CLOSED)).all()), "what a sample asks for must be 0, 1 or 2")
        low, high = int(true.min()), int(true.max())
        require(low >= -1 and high < num_classes, f"classes span {low} to {high}, expected -1 to {num_classes - 1}")
        require(bool((true[asked > LABELS, 1:] == -1).all()), "a question must have one answer at most")

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """The answer, or the first label that is true; 0 where there is none."""
        return targets[:, 1].clip(0)

    def example(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray:
        """Targets [n, 3]: questions, some with answers outside of the list, and samples with up to two labels."""
        asked = rng.integers(0, 3, n)
        first, second = rng.integers(-1, num_classes, (2, n))
        return np.stack([asked, first, np.where((asked > LABELS) | (second == first), -1, second)], 1)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Summed over the client's list.  # [..., B]"""
        hot = _hot(y, logits.shape[-1]).to(logits.dtype)
        each = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")  # [..., B, C]
        return (each if class_mask is None else each * class_mask.unsqueeze(-2)).sum(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Of each sample: answered, the largest logit; p, how many are predicted; tp, of them right; cells, the length
        of the list; and the logits themselves, for the area under the ROC curve."""
        own = mask_logits(logits, class_mask)  # [k, b, C]
        predicted = own > 0
        length = y.new_tensor(logits.shape[-1]) if class_mask is None else class_mask.sum(-1, keepdim=True)
        return {
            "loss": self.loss(logits, y, class_mask),
            "y": y,
            "answered": own.argmax(-1),
            "p": predicted.sum(-1),
            "tp": (predicted & _hot(y, logits.shape[-1])).sum(-1),
            "cells": length.expand(y.shape[:-1]),
            "logits": logits,
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """micro_f1: of yes or no to each of the client's list, for questions and labels alike.  Of questions, NaN for a
        client without any: accuracy, accuracy_open, accuracy_closed, ceiling and f1_flat, as of task=vqa.  Of samples
        with labels, NaN without any: f1 (macro), sample_f1 and auc (macro), as of task=multilabel."""
        y = statistics["y"].cpu().numpy()
        answered, p, tp, cells = (statistics[name].cpu().numpy() for name in ("answered", "p", "tp", "cells"))
        question, closed = y[:, 0] > LABELS, y[:, 0] == CLOSED
        hit, known, true = question & (answered == y[:, 1]), question & (y[:, 1] >= 0), (y[:, 1:] >= 0).sum(1)
        counts = np.stack([tp, p, true, cells], 1)  # [n, 4]
        asked = np.stack([question, closed, hit, hit & closed, known], 1)
        n, num_closed, hits, closed_hits, answerable = sum_by_client(asked, offsets).T  # [N] each
        all_tp, all_p, all_true, _ = sum_by_client(counts, offsets).T
        return {
            "loss": mean_loss(statistics["loss"], offsets),
            "micro_f1": ratio(2 * all_tp, all_p + all_true),
            "accuracy": ratio(hits, n),
            "accuracy_open": ratio(hits - closed_hits, n - num_closed),
            "accuracy_closed": ratio(closed_hits, num_closed),
            "ceiling": ratio(answerable, n),
            "f1_flat": f1_flat(*sum_by_client(counts * question[:, None], offsets).T),
            **_label_scores(statistics, ~question, offsets, class_mask),
        }


def _hot(y: Tensor, num_classes: int) -> Tensor:
    """What is true.  # bool [..., B, C]"""
    true = y[..., 1:]  # [..., B, L]
    hot = torch.zeros(*y.shape[:-1], num_classes + 1, dtype=torch.bool, device=y.device)  # the last one for -1
    return hot.scatter(-1, true.where(true >= 0, num_classes), True)[..., :num_classes]


def _label_scores(
    statistics: SampleStatistics, which: np.ndarray, offsets: np.ndarray, class_mask: np.ndarray | None
) -> dict[str, np.ndarray]:
    """OF_LABELS, of the samples which [n]; the columns of other clients' longer lists are left out."""
    if not which.any():
        return {name: np.full(len(offsets) - 1, np.nan) for name in OF_LABELS}
    rows = torch.from_numpy(np.flatnonzero(which)).to(statistics["y"].device)
    some = np.concatenate(([0], np.cumsum(which)))[offsets]  # [N + 1]
    logits, hot = (
        statistics["logits"][rows],
        _hot(statistics["y"][rows], statistics["logits"].shape[1]),
    )
    if class_mask is not None:
        columns = np.flatnonzero(class_mask[np.diff(some) > 0].any(0))
        at = torch.from_numpy(columns).to(logits.device)
        logits, hot, class_mask = logits[:, at], hot[:, at], class_mask[:, columns]
    kept = {"loss": statistics["loss"][rows], "logits": logits, "y": hot}
    scores = MultiLabel(sample_f1=True).scores(kept, some, class_mask)
    return {name: scores[name] for name in OF_LABELS}
