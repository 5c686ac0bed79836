"""Clients that answer questions and clients that assign labels, from lists of at most C.  k clients, B samples each."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._metrics import answer_scores, sum_by_client, weighted_binary_f1
from fedbench.tasks.base import SampleStatistics, Task, check_primary, mean_loss, ratio
from fedbench.tasks.classification import mask_logits, require_two_classes
from fedbench.tasks.multilabel import MultiLabel

LABELS, OPEN, CLOSED = 0, 1, 2  # what a sample asks for: labels, or the answer to an open or a closed question
QUESTION_METRICS = ("accuracy", "accuracy_open", "accuracy_closed", "ceiling", "f1_flat")
LABEL_METRICS = ("f1", "sample_f1", "auc")


class Mixed(Task):
    """Binary cross-entropy, summed over the client's list of answers or labels.

    Targets are [..., B, 1 + L] int64, where L is the largest number of true labels of a sample.  The first column is
    LABELS, OPEN or CLOSED.  The other columns are indices in the client's list: the sample's true labels, or the answer
    to its question if the list has it; -1 fills the remaining columns.  Logits are [..., B, C], where C is the length
    of the longest list.  The first logits are those of the client's list (class_mask).

    A label or answer is predicted if its logit is > 0.  The largest logit is the model's answer to a question.

    Args:
        primary: Metric that selects the best round and is shown in tables.
    """

    kind = "mixed"
    primary = "micro_f1"
    higher_is_better = {"loss": False, **dict.fromkeys(("micro_f1", *QUESTION_METRICS, *LABEL_METRICS), True)}
    fractions = frozenset(("micro_f1", *QUESTION_METRICS, *LABEL_METRICS))

    def __init__(self, primary: str = "micro_f1"):
        self.primary = check_primary(primary, self)

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are int64 [n, 1 + L].

        Column 0 is the kind of sample: LABELS (0), OPEN (1) or CLOSED (2) question.  The other columns are indices in
        the client's list: up to L true labels, or one answer; -1 fills the remaining columns.
        """
        require_two_classes(num_classes, self.kind)
        fits = targets.ndim == 2 and targets.shape[1] >= 2 and targets.dtype == np.int64
        require(
            fits,
            f"the targets of task=mixed have dtype {targets.dtype} and shape {targets.shape}, expected int64 [n, 1 + "
            "L]: store in column 0 the kind of each of the n samples, 0 (labels), 1 (open question) or 2 (closed "
            "question), and behind it its L >= 1 labels or answers, -1 for none",
        )
        sample_kind, true = targets[:, 0], targets[:, 1:]
        unknown = np.setdiff1d(sample_kind, (LABELS, OPEN, CLOSED))
        require(
            not len(unknown),
            f"column 0 of the targets of task=mixed contains {', '.join(map(str, unknown[:5]))}: store 0 (labels), 1 "
            "(open question) or 2 (closed question)",
        )
        low, high = int(true.min()), int(true.max())
        require(
            low >= -1 and high < num_classes,
            f"the classes span {low} to {high}, expected -1 to {num_classes - 1}: number the {num_classes} classes "
            "from 0, and store -1 for none",
        )
        has_two_answers = (sample_kind > LABELS) & (true[:, 1:] != -1).any(1)  # [n]
        require(
            not has_two_answers.any(),
            f"the targets of task=mixed have {np.count_nonzero(has_two_answers)} questions with several answers: "
            "store the answer of a question in column 1, and -1 in all later columns",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return column 1 of targets [n, 1 + L]: the answer of a question, else the first label; 0 if there is none.

        # [n] int64
        """
        return targets[:, 1].clip(0)

    def example_targets(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray:
        """Return n random targets [n, 3] int64: kind of sample (labels, open or closed question), and two values.

        The values are up to two labels or one answer, each below num_classes, and -1 for none.
        """
        sample_kind = rng.integers(0, 3, n)
        first, second = rng.integers(-1, num_classes, (2, n))
        has_no_second = (sample_kind > LABELS) | (second == first)  # a question has one answer; labels are distinct
        return np.stack([sample_kind, first, np.where(has_no_second, -1, second)], 1)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the binary cross-entropy of each sample, summed over its client's list.  # [..., B]

        Args:
            logits: Outputs of the model, [..., B, C].
            y: Targets, [..., B, 1 + L]: the kind of sample, then up to L true entries of the list, filled with -1.
            class_mask: The entries of the list of each client, [k, C] bool.  None: all.
        """
        true = _true_classes(y, logits.shape[-1]).to(logits.dtype)
        bce = F.binary_cross_entropy_with_logits(logits, true, reduction="none")  # [..., B, C]
        return (bce if class_mask is None else bce * class_mask.unsqueeze(-2)).sum(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return the statistics of each sample, [k, B, ...] each.

        - loss: the loss.
        - y: the targets.
        - answer: the index of the largest logit.
        - p: the number of predicted labels or answers (positives).
        - tp: the number of those that are correct (true positives).
        - list_length: the length of the client's list; C without class_mask.
        - logits: the logits, which the ROC AUC needs.

        Args:
            logits: Outputs of the model, [k, B, C].
            y: Targets, [k, B, 1 + L]: the kind of sample, then up to L true entries of the list, filled with -1.
            class_mask: The entries of the list of each client, [k, C] bool.  None: all.
        """
        masked = mask_logits(logits, class_mask)  # [k, B, C]
        predicted = masked > 0
        length = y.new_tensor(logits.shape[-1]) if class_mask is None else class_mask.sum(-1, keepdim=True)
        return {
            "loss": self.loss(logits, y, class_mask),
            "y": y,
            "answer": masked.argmax(-1),
            "p": predicted.sum(-1),
            "tp": (predicted & _true_classes(y, logits.shape[-1])).sum(-1),
            "list_length": length.expand(y.shape[:-1]),
            "logits": logits,
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - loss: mean over the client's samples.
        - micro_f1: F1 of the binary decisions about each entry of the list, for questions and labels.
        - accuracy, accuracy_open, accuracy_closed: fraction of correctly answered questions.
        - ceiling: fraction of questions whose answer is in the client's list.
        - f1_flat: the mean F1 of the decisions "yes" and "no" about each answer of a question, weighted by how often
          each is true.
        - f1 (macro), sample_f1, auc (macro): of samples with labels, as `MultiLabel.scores` describes.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The entries of the list of each client, [N, C] bool.  None: all.
        """
        names = ("y", "answer", "tp", "p", "list_length")
        y, answer, tp, p, list_length = (statistics[name].cpu().numpy() for name in names)
        # y: the kind of sample (0 labels, 1 open question, 2 closed one), then the true entries of the list, or -1
        question = y[:, 0] > LABELS
        # true positives, predicted positives, true entries, and length of the list  [n, 4]
        counts = np.stack([tp, p, (y[:, 1:] >= 0).sum(1), list_length], 1)
        all_tp, all_p, all_true, _ = sum_by_client(counts, offsets).T  # [N] each
        # of questions only, in the order of the arguments of weighted_binary_f1  [N] each
        of_questions = sum_by_client(counts * question[:, None], offsets).T
        return {
            "loss": mean_loss(statistics["loss"], offsets),
            "micro_f1": ratio(2 * all_tp, all_p + all_true),
            **answer_scores(
                correct=question & (answer == y[:, 1]),
                closed=y[:, 0] == CLOSED,
                in_list=question & (y[:, 1] >= 0),
                question=question,
                offsets=offsets,
            ),
            "f1_flat": weighted_binary_f1(*of_questions),
            **_label_scores(statistics, ~question, offsets, class_mask),
        }


def _true_classes(y: Tensor, num_classes: int) -> Tensor:
    """Return which entries of its client's list are true for each sample.

    Args:
        y: Targets, [..., B, 1 + L]: the kind of sample, then indices of true entries, filled with -1.
        num_classes: C, the length of the longest list.

    Returns:
        Truth values, [..., B, C] bool.
    """
    index = y[..., 1:]  # [..., B, L]
    # One column more than classes: the scatter writes the unused entries, -1, there.
    true = torch.zeros(*y.shape[:-1], num_classes + 1, dtype=torch.bool, device=y.device)
    return true.scatter(-1, index.where(index >= 0, num_classes), True)[..., :num_classes]


def _label_scores(
    statistics: SampleStatistics, has_labels: np.ndarray, offsets: np.ndarray, class_mask: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return the metrics of each client over its samples with labels, without its questions.

    Args:
        statistics: Statistics of all n samples, as `Mixed.sample_statistics` returns them.
        has_labels: Whether a sample asks for labels, [n] bool.  Questions are left out.
        offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
        class_mask: The list of each client, [N, C] bool.  None: all.

    Returns:
        LABEL_METRICS by name, [N] each, NaN for a client without such samples.
    """
    if not has_labels.any():
        return {name: np.full(len(offsets) - 1, np.nan) for name in LABEL_METRICS}
    samples = torch.from_numpy(np.flatnonzero(has_labels)).to(statistics["y"].device)
    # [N + 1], offsets of the clients among the samples with labels
    label_offsets = np.concatenate(([0], np.cumsum(has_labels)))[offsets]
    logits = statistics["logits"][samples]
    true = _true_classes(statistics["y"][samples], logits.shape[1])
    if class_mask is not None:
        # Leave out the classes that only the lists of answers have, because the ROC AUC sorts once for each class.
        used = np.flatnonzero(class_mask[np.diff(label_offsets) > 0].any(0))
        columns = torch.from_numpy(used).to(logits.device)
        logits, true, class_mask = logits[:, columns], true[:, columns], class_mask[:, used]
    label_statistics = {"loss": statistics["loss"][samples], "logits": logits, "y": true}
    scores = MultiLabel(sample_f1=True).scores(label_statistics, label_offsets, class_mask)
    return {name: scores[name] for name in LABEL_METRICS}
