"""Visual question answering: each client has its own list of at most C answers.  k clients with B questions each."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._metrics import answer_scores, sum_by_client, weighted_binary_f1
from fedbench.tasks.base import SampleStatistics, Task, TrainingData, check_primary, mean_loss, ratio
from fedbench.tasks.classification import mask_logits


class VQA(Task):
    """Answers from the client's list.

    Targets are [..., B, 2] int64: the index of the answer in the client's list (-1: not in the list), and whether the
    question is closed.  Logits are [..., B, C], where C is the length of the longest list.  The first logits are those
    of the client's answers (class_mask).

    Args:
        loss: bce_sum, the binary cross-entropy summed over the client's answers (FedDAT), or cross_entropy.
        f1: Whether to record micro_f1 and f1_flat as well (see `scores`).
        primary: Metric that selects the best round and is shown in tables.
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
        require(
            loss in ("bce_sum", "cross_entropy"), f"task.loss={loss} is not a loss of vqa: set bce_sum or cross_entropy"
        )
        self.loss_name = loss
        self.f1 = f1
        if f1:
            self.higher_is_better = {**type(self).higher_is_better, "micro_f1": True, "f1_flat": True}
        self.primary = check_primary(primary, self)

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are int64 [n, 2]: an answer from -1 to C - 1, and 1 if closed, else 0.

        The answer is its index in the client's list, -1 if it is not there.  Closed questions have a fixed choice of
        answers, such as yes and no.
        """
        require(
            num_classes >= 2,
            f"the data set has num_classes={num_classes}, but vqa needs at least 2 answers: lower dataset.min_count, "
            "or list more answers in dataset.answers; if neither is set, add answers to the file of the data set",
        )
        fits = targets.ndim == 2 and targets.shape[1:] == (2,) and targets.dtype == np.int64
        require(
            fits,
            f"the targets of task=vqa have dtype {targets.dtype} and shape {targets.shape}, expected int64 [n, 2]: "
            "store the answer of each of the n questions, and 1 if the question is closed, else 0",
        )
        low, high = int(targets[:, 0].min()), int(targets[:, 0].max())
        require(
            low >= -1 and high < num_classes,
            f"the answers span {low} to {high}, expected -1 to {num_classes - 1}: number the {num_classes} answers "
            "from 0, and store -1 for a question whose answer is none of them",
        )
        unknown = np.setdiff1d(targets[:, 1], (0, 1))
        require(
            not len(unknown),
            f"column 1 of the targets of task=vqa contains {', '.join(map(str, unknown[:5]))}: store 1 for a closed "
            "question, else 0",
        )

    def setup(self, federation: TrainingData) -> None:
        """Set `num_answers` to the number of classes: how many answers a client has, unless class masks allow fewer."""
        self.num_answers = federation.num_classes

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return column 0 of targets [n, 2], the index of each answer in its client's list; 0 instead of -1, for none.

        # [n] int64
        """
        return targets[:, 0].clip(0)

    def example_targets(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray:
        """Return n random targets [n, 2] int64: an answer, and 1 for a closed question, else 0.

        The answer is below num_classes, and in about a tenth of the questions -1, which is not in the list."""
        answer = np.where(rng.random(n) < 0.1, -1, rng.integers(0, num_classes, n))
        return np.stack([answer, rng.integers(0, 2, n)], 1).astype(np.int64)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the loss of each question over the answers of its client's list.  # [..., B]

        The option loss (``loss_name``) is "bce_sum", the sum of binary cross-entropies, or "cross_entropy".  If the
        correct answer is not in the list, bce_sum takes all answers of the list as wrong, and cross_entropy takes them
        as equally likely.

        Args:
            logits: Outputs of the model, [..., B, C].
            y: Targets, [..., B, 2]: the index of the answer, -1 if it is not in the client's list, and 1 if closed.
            class_mask: The answers of each client, [k, C] bool.  None: all.
        """
        answer = y[..., 0]  # index in the client's list; y[..., 1] is whether the question is closed
        # An answer that is not in the list, -1, becomes a row of zeros.
        one_hot = F.one_hot(answer.clamp_min(0), logits.shape[-1]).to(logits.dtype) * (answer >= 0)[..., None]
        if class_mask is None:
            in_list = torch.ones_like(one_hot)
        else:
            in_list = class_mask.unsqueeze(-2).to(one_hot.dtype).expand_as(one_hot)
        if self.loss_name == "bce_sum":
            return (F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none") * in_list).sum(-1)
        # Target distribution: the answer, or uniform over the client's list if it lacks the answer.
        probability = torch.where((answer >= 0)[..., None], one_hot, in_list / in_list.sum(-1, keepdim=True))
        log_p = mask_logits(logits, class_mask).log_softmax(-1)
        return -torch.where(probability > 0, log_p * probability, 0).sum(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return the statistics of each question, [k, B] each.

        - loss: the loss.
        - correct: whether the answer with the largest logit is correct.
        - in_list: whether the correct answer is in the client's list.
        - closed: whether the question is closed.
        - p (with the option f1): the number of predicted answers (logit > 0).
        - tp (with the option f1): whether the correct answer is among them.

        Args:
            logits: Outputs of the model, [k, B, C].
            y: Targets, [k, B, 2]: the index of the answer, -1 if it is not in the client's list, and 1 if closed.
            class_mask: The answers of each client, [k, C] bool.  None: all.
        """
        answer = y[..., 0]
        statistics = {
            "loss": self.loss(logits, y, class_mask),
            "correct": mask_logits(logits, class_mask).argmax(-1) == answer,
            "in_list": answer >= 0,
            "closed": y[..., 1] > 0,
        }
        if self.f1:
            predicted = mask_logits(logits, class_mask) > 0  # [k, B, C]
            # is the correct answer predicted?  -1, which is not in the list, is looked up as 0 and then excluded
            tp = predicted.gather(-1, answer.clamp_min(0)[..., None])[..., 0] & (answer >= 0)
            statistics |= {"tp": tp, "p": predicted.sum(-1)}
        return statistics

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - accuracy, accuracy_open, accuracy_closed: fraction of correctly answered questions.
        - ceiling: fraction of questions whose answer is in the client's list.
        - micro_f1 (with the option f1): F1 of the binary decisions about each answer of the list.
        - f1_flat (with the option f1): the mean of the F1 of the decisions "yes" (which is micro_f1) and "no", weighted
          by how often each is true.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: The answers of each client, [N, C] bool.  None: all.
        """
        values = {name: t.cpu().numpy() for name, t in statistics.items()}
        in_list = values["in_list"]
        scores = {
            "loss": mean_loss(statistics["loss"], offsets),
            **answer_scores(
                values["correct"],
                values["closed"],
                in_list,
                question=np.ones_like(in_list),  # all samples are questions
                offsets=offsets,
            ),
        }
        if self.f1:
            # over the answers of the list: true positives, predicted positives and true answers of a client  [N] each
            tp, p, true = sum_by_client(np.stack([values["tp"], values["p"], in_list], 1), offsets).T
            # length of each client's list: C (num_answers) without class_mask
            answers = self.num_answers if class_mask is None else class_mask.sum(1)
            scores["micro_f1"] = ratio(2 * tp, p + true)
            scores["f1_flat"] = weighted_binary_f1(tp, p, true, total=answers * np.diff(offsets))
        return scores
