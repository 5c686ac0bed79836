"""Numbers: squared, absolute or Huber's loss."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.tasks._counts import sum_by_client
from fedbench.tasks.base import SampleStatistics, Task, Training, check_primary, mean_loss, ratio

BINS = 10  # of equal size, of the first target: what partitions see as labels


class Regression(Task):
    """y [..., B, R] float (or [..., B], where R = 1), outputs [..., B, R].

    loss: mse, mae, or huber (squared up to a distance of 1), mean over the R targets.  standardize: whether the model
    learns targets less their mean, over their standard deviation, both of the training parts of all clients together;
    the loss is of these, scores are in the data set's own units.  primary: the score to go by.
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
        require(loss in ("mse", "mae", "huber"), f"task.loss must be one of mse, mae, huber, got {loss}")
        self.loss_name, self.standardize = loss, standardize
        self.primary = check_primary(primary, self)
        self.mean, self.std = torch.zeros(1), torch.ones(1)  # [R]

    def check(self, targets: np.ndarray, num_classes: int) -> None:
        """Refuse all but finite float32 [n] or [n, R], R = `num_classes`."""
        shape = targets.shape[1:] or (1,)
        require(
            targets.dtype == np.float32 and shape == (num_classes,),
            f"targets of {self.kind} are {targets.dtype} {targets.shape}, expected float32 [n, {num_classes}]",
        )
        require(bool(np.isfinite(targets).all()), "targets hold values that are not finite (NaN or infinite)")

    def labels(self, targets: np.ndarray, num_classes: int) -> np.ndarray:
        """Which of BINS quantiles the first target is in, from 0."""
        y = targets.reshape(len(targets), -1)[:, 0]
        edges = np.quantile(y, np.arange(1, BINS) / BINS)
        return np.searchsorted(edges, y, side="right").astype(np.int64)

    def setup(self, federation: Training) -> None:
        """Measure the training targets."""
        device = federation.device
        if self.standardize:
            index = torch.from_numpy(federation.splits["train"].indices).to(federation.targets.device)
            y = federation.targets[index].double().reshape(len(index), -1)  # [n, R]
            std = y.std(0, correction=0)
            self.mean, self.std = y.mean(0).float().to(device), std.where(std > 0, 1.0).float().to(device)
        else:
            self.mean, self.std = torch.zeros(1, device=device), torch.ones(1, device=device)

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        """Of each sample, in units of the standardized targets.  # [..., B]"""
        distance = logits - (y.view(logits.shape) - self.mean) / self.std  # [..., B, R]
        if self.loss_name == "mse":
            return distance.square().mean(-1)
        size = distance.abs()
        if self.loss_name == "mae":
            return size.mean(-1)
        return torch.where(size <= 1, 0.5 * distance.square(), size - 0.5).mean(-1)

    def sample_statistics(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> SampleStatistics:
        """Error and target of every sample, in the data set's units."""
        targets = y.view(logits.shape)
        return {
            "loss": self.loss(logits, y, class_mask),
            "error": logits * self.std + self.mean - targets,
            "y": targets,
        }

    def scores(
        self, statistics: SampleStatistics, offsets: np.ndarray, class_mask: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """rmse: root of the mean squared error over samples and targets.  mae: mean absolute error.  r2: 1 - squared
        error over the variance of a client's own targets, mean over the R targets, NaN where they do not vary."""
        error, y = (
            statistics["error"].double().cpu().numpy(),
            statistics["y"].double().cpu().numpy(),
        )  # [n, R]
        sizes = np.diff(offsets)[:, None]  # [N, 1]
        squared = sum_by_client(error**2, offsets)  # [N, R]
        center = ratio(sum_by_client(y, offsets), sizes)  # [N, R]
        spread = sum_by_client((y - np.repeat(center, sizes[:, 0], 0)) ** 2, offsets)
        return {
            "loss": mean_loss(statistics["loss"], offsets),
            "rmse": np.sqrt(ratio(squared, sizes).mean(1)),
            "mae": ratio(sum_by_client(np.abs(error), offsets), sizes).mean(1),
            "r2": 1 - ratio(squared, spread).mean(1),
        }
