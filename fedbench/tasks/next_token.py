"""Next-token prediction, as in language models: k clients with B texts of T tokens each, and C different tokens."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._metrics import sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, TrainingData, check_primary, mean_loss, ratio
from fedbench.tasks.classification import require_two_classes

IGNORED = -1  # the target of a position without one: padding, or a token of a prompt


class NextToken(Task):
    """Cross-entropy of targets [..., B, T] int64 and logits [..., B, T, C], over the positions with a target.

    All target tokens have the same weight.  The loss of a sample is the sum over its tokens, divided by the mean number
    of target tokens of a training sample of all clients.

    Args:
        primary: Metric that selects the best round and is shown in tables.
    """

    kind = "next_token"
    primary = "perplexity"
    higher_is_better = {"loss": False, "perplexity": False, "accuracy": True}
    fractions = frozenset(("accuracy",))
    predicts = "tokens"

    def __init__(self, primary: str = "perplexity"):
        self.primary = check_primary(primary, self)
        self.tokens_per_sample = 1.0  # mean number of target tokens, set by `setup`

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are int64 [n, T], the next token at each of T positions.

        Tokens are from 0 to num_classes - 1.  IGNORED (-1) marks a position without a target; not all may be ignored.
        """
        require_two_classes(num_classes, self.kind)
        require(
            targets.dtype == np.int64 and targets.ndim == 2,
            f"the targets of task={self.kind} have dtype {targets.dtype} and shape {targets.shape}, expected int64 "
            "[samples, tokens]: store the next token of each position, and -1 for padding",
        )
        low, high = int(targets.min()), int(targets.max())
        require(
            low >= IGNORED and 0 <= high < num_classes,
            f"the tokens span {low} to {high}, expected -1 (no target) to {num_classes - 1}: number the {num_classes} "
            "tokens from 0, or correct num_classes of the data set",
        )

    def example_targets(self, rng: np.random.Generator, n: int, num_classes: int) -> np.ndarray:
        """Return random targets of n texts with 6 positions.  # [n, 6] int64

        They are tokens from 0 to num_classes - 1; up to two positions at each end have no target (-1).
        """
        targets = rng.integers(0, num_classes, (n, 6))
        first, last = rng.integers(0, 3, (n, 1)), rng.integers(3, 6, (n, 1))
        positions = np.arange(6)
        return np.where((positions >= first) & (positions <= last), targets, IGNORED)

    def setup(self, federation: TrainingData) -> None:
        """Count the target tokens of the training samples of all clients.

        `loss` divides by their mean number per sample.

        Raises:
            ConfigError: They have none.
        """
        index = torch.from_numpy(federation.splits["train"].indices).to(federation.targets.device)
        count = int((federation.targets[index] != IGNORED).sum())
        require(count > 0, "no training sample has a target token: choose texts that are longer than one token")
        self.tokens_per_sample = count / len(index)

    def output_shape(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of the logits for targets y [B, T]: (B, T, outputs), where outputs is C."""
        return *y.shape, outputs

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the loss of each sample: the sum over its tokens, divided by the mean number of tokens.  # [..., B]

        This mean is ``tokens_per_sample``, of the training samples of all clients, so that all tokens weigh the same.

        Args:
            logits: Outputs of the model, [..., B, T, C].
            y: Targets, [..., B, T].
            class_mask: The tokens of each client, [k, C] bool.  None: all.
        """
        return _token_losses(logits, y, class_mask).sum(-1) / self.tokens_per_sample

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return sums over the target tokens of each sample, [k, B] each.

        - loss: token_loss, divided by the mean number of target tokens of a training sample.
        - token_loss: cross-entropies.
        - correct: correctly predicted tokens.
        - tokens: all target tokens.

        Args:
            logits: Outputs of the model, [k, B, T, C].
            y: Targets, [k, B, T].
            class_mask: The tokens of each client, [k, C] bool.  None: all.
        """
        token_loss = _token_losses(logits, y, class_mask).sum(-1)
        predicted = _masked(logits, class_mask).argmax(-1)  # [k, B, T]
        return {
            "loss": token_loss / self.tokens_per_sample,
            "token_loss": token_loss,
            "correct": (predicted == y).sum(-1),  # y is -1 for positions without a target, which no prediction equals
            "tokens": (y != IGNORED).sum(-1),
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - loss: mean over the client's samples.
        - perplexity: exp of the mean cross-entropy of all target tokens of the client.
        - accuracy: fraction of all target tokens that are predicted correctly.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: Not used.
        """
        columns = np.stack([statistics[name].double().cpu().numpy() for name in ("token_loss", "correct", "tokens")], 1)
        token_loss, correct, tokens = sum_by_client(columns, offsets).T  # [N] each
        with np.errstate(over="ignore"):  # a diverged model has the perplexity inf
            perplexity = np.exp(ratio(token_loss, tokens))
        return {
            "loss": mean_loss(statistics["loss"], offsets),
            "perplexity": perplexity,
            "accuracy": ratio(correct, tokens),
        }


def _masked(logits: Tensor, class_mask: Tensor | None) -> Tensor:
    """Return logits [k, B, T, C] with -inf for the tokens that a client does not have.

    class_mask [k, C] bool is False for them; None: unchanged.
    """
    return logits if class_mask is None else logits.masked_fill(~class_mask[:, None, None], float("-inf"))


def _token_losses(logits: Tensor, y: Tensor, class_mask: Tensor | None) -> Tensor:
    """Return the cross-entropy of each position, 0 for those without a target (IGNORED, -1).

    Args:
        logits: Outputs of the model, [..., B, T, C].
        y: Targets, [..., B, T].
        class_mask: The tokens of each client, [k, C] bool.  None: all.

    Returns:
        Cross-entropies, [..., B, T].
    """
    z = _masked(logits, class_mask).reshape(-1, logits.shape[-1])  # [n, C]
    return F.cross_entropy(z, y.reshape(-1), reduction="none", ignore_index=IGNORED).view(y.shape)
