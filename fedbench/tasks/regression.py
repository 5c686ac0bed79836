"""Regression of R real targets, with squared, absolute or Huber loss.  Letters: k clients with B samples each."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._metrics import sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, TrainingData, check_primary, mean_loss, ratio

BINS = 10  # intervals with equal numbers of samples into which the first target is divided, the labels for partitions


class Regression(Task):
    """Loss of targets [..., B, R] float (or [..., B] if R = 1) and outputs [..., B, R].

    Args:
        loss: mse (squared error), mae (absolute error) or huber (half the squared error up to an error of 1, absolute
            error - 0.5 beyond), each the mean over the R targets.
        standardize: Whether the model predicts standardized targets, with the pooled mean and standard deviation of all
            clients' training samples.  Metrics have the original units.
        primary: Metric that selects the best round and is shown in tables.
    """

    kind = "regression"
    predicts = "numbers"
    primary = "rmse"
    higher_is_better = {"loss": False, "rmse": False, "mae": False, "r2": True}

    def __init__(
        self,
        loss: Literal["mse", "mae", "huber"] = "mse",
        standardize: bool = True,
        primary: str = "rmse",
    ):
        require(loss in ("mse", "mae", "huber"), f"task.loss={loss} is not a loss of regression: set mse, mae or huber")
        self.loss_name = loss
        self.standardize = standardize
        self.primary = check_primary(primary, self)
        self.mean = torch.zeros(1)  # [R]
        self.std = torch.ones(1)  # [R]

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Raise ConfigError unless targets are finite float32 numbers [n, R] with R = num_classes, or [n] if R = 1."""
        shape = targets.shape[1:] or (1,)
        require(
            targets.dtype == np.float32 and shape == (num_classes,),
            f"the targets of task={self.kind} have dtype {targets.dtype} and shape {targets.shape}, expected float32 "
            f"[n, {num_classes}]: store num_classes={num_classes} float32 numbers for each of the n samples",
        )
        num_bad = int((~np.isfinite(targets)).sum())
        require(
            num_bad == 0,
            f"the targets must be finite, but {num_bad} are NaN or infinite: replace them, or remove their samples",
        )

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Return labels by the first target of each sample: 0 for the smallest tenth, to 9 for the largest.

        Args:
            targets: Targets, [n] or [n, R].
            num_classes: Not used.

        Returns:
            Index of the interval between quantiles, [n] int64 from 0 to BINS - 1.
        """
        y = targets.reshape(len(targets), -1)[:, 0]
        edges = np.quantile(y, np.arange(1, BINS) / BINS)  # [BINS - 1]
        return np.searchsorted(edges, y, side="right").astype(np.int64)

    def setup(self, federation: TrainingData) -> None:
        """Set ``mean`` and ``std`` [R] by the training targets of all clients; keep 0 and 1 if standardize is False.

        The std of a constant target is 1.
        """
        device = federation.device
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        if self.standardize:
            index = torch.from_numpy(federation.splits["train"].indices).to(federation.targets.device)
            y = federation.targets[index].double().reshape(len(index), -1)  # [n, R]
            std = y.std(0, correction=0)
            self.mean = y.mean(0).float().to(device)
            self.std = std.where(std > 0, 1.0).float().to(device)  # a constant target is not scaled

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Return the loss of each sample, computed with standardized targets if the option standardize is True.

        They are standardized by ``mean`` and ``std`` [R] of the training targets, which are 0 and 1 otherwise.

        Args:
            logits: Outputs of the model, [..., B, R].
            y: Targets in the original units, [..., B, R], or [..., B] if R = 1.
            class_mask: Not used.

        Returns:
            Losses, [..., B], the mean over the R targets of the squared error (loss_name "mse"), the absolute error
            ("mae") or the Huber loss with threshold 1 ("huber").
        """
        error = logits - (y.view(logits.shape) - self.mean) / self.std  # [..., B, R]
        if self.loss_name == "mse":
            return error.square().mean(-1)
        distance = error.abs()
        if self.loss_name == "mae":
            return distance.mean(-1)
        return torch.where(distance <= 1, 0.5 * error.square(), distance - 0.5).mean(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Return "loss" [k, B], and in the original units "error" (prediction - target) and target "y" [k, B, R].

        Args:
            logits: Outputs of the model, [k, B, R]: standardized if the option standardize is True.
            y: Targets in the original units, [k, B, R], or [k, B] if R = 1.
            class_mask: Not used.
        """
        targets = y.view(logits.shape)
        return {
            "loss": self.loss(logits, y, class_mask),
            "error": logits * self.std + self.mean - targets,
            "y": targets,
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the metrics of each client, [N] each.

        - loss: mean over the client's samples.
        - rmse: root of the mean squared error over samples and targets.
        - mae: mean absolute error over samples and targets.
        - r2: coefficient of determination, mean over the R targets; NaN if a target is constant.

        Args:
            statistics: What `sample_statistics` returns, for all n samples in client order, by name.
            offsets: Client i has the samples offsets[i]:offsets[i + 1], [N + 1].
            class_mask: Not used.
        """
        error = statistics["error"].double().cpu().numpy()  # [n, R]
        y = statistics["y"].double().cpu().numpy()  # [n, R]
        sizes = np.diff(offsets)[:, None]  # [N, 1]
        squared_error = sum_by_client(error**2, offsets)  # [N, R]
        center = ratio(sum_by_client(y, offsets), sizes)  # [N, R], mean target of each client
        squared_deviation = sum_by_client((y - np.repeat(center, sizes[:, 0], 0)) ** 2, offsets)
        return {
            "loss": mean_loss(statistics["loss"], offsets),
            "rmse": np.sqrt(ratio(squared_error, sizes).mean(1)),
            "mae": ratio(sum_by_client(np.abs(error), offsets), sizes).mean(1),
            "r2": 1 - ratio(squared_error, squared_deviation).mean(1),
        }
