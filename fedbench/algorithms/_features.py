"""Features, the inputs of a model's head, for methods whose losses read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbench.algorithms._heads import require_linear_head
from fedbench.algorithms.base import Batch, Federation, FlatModel, Step
from fedbench.core.options import require


def require_features(model: FlatModel) -> None:
    """Require a head by which logits are computed from features.

    Raises:
        ConfigError: The model has no linear layer named head.
    """
    require_linear_head(model)


def require_labels(federation: Federation, name: str) -> None:
    """Require a data set with one class per sample.

    Args:
        federation: The clients and their data.
        name: The method's name in the option algorithm.

    Raises:
        ConfigError: Samples do not have one class each.
    """
    require(
        federation.task.single_label,
        f"algorithm={name} needs one class per sample, and task={federation.task.kind} has other targets",
    )


def num_features(model: FlatModel) -> int:
    """Return F, the number of inputs of the model's linear head."""
    head = model.module.head
    return head.in_features if isinstance(head, nn.Linear) else head.in_channels  # type: ignore[union-attr]


def features_and_logits(s: Step, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the features and the logits of rows [k, P], by one forward pass.  # [k, B, F], [k, B, C]"""
    z = s.features(rows, batch)
    return z, s.model.head(rows, z)


@torch.no_grad()
def frozen_features(s: Step, rows: Tensor, batch: Batch) -> Tensor:
    """Return the features of fixed rows, [P] or [k, P], in evaluation mode and without a gradient.  # [k, B, F]"""
    return s.model.features(rows.expand(s.k, -1), batch.x)
