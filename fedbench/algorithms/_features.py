"""Features, the inputs of a model's head, for methods whose losses read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbench.algorithms._heads import require_linear_head
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Step
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


BANDWIDTHS = (10, 15, 20, 50)  # a of the kernels exp(-d^2 / 2a)


def mmd(z: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy between two sets of features, of a sum of Gaussian kernels.

    Args:
        z: Features of a batch.  # [k, B, F]
        other: Other features of the same batch.  # [k, B, F]
        weight: Weights of the samples, of sum 1 and 0 for padding.  # [k, B]

    Returns:
        The discrepancy of each client.  # [k]
    """

    def mean(a: Tensor, b: Tensor) -> Tensor:  # [k]
        d2 = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None] - 2 * a @ b.mT  # [k, B, B]
        kernels = torch.stack([(d2 / (-2 * bandwidth)).exp() for bandwidth in BANDWIDTHS]).sum(0)
        return torch.einsum("kbc,kb,kc->k", kernels, weight, weight)

    return mean(z, z) + mean(other, other) - 2 * mean(z, other)


# -- statistics of the features of all training samples --------------------------------------------------
@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of features by client and class.

    Attributes:
        counts: Number of samples.  # [K, C]
        means: Means of the features, 0 for absent classes.  # [K, C, F]
        squares: Means of their squared norms, 0 for absent classes.  # [K, C]
    """

    counts: Tensor
    means: Tensor
    squares: Tensor


def features_of_samples(cohort: Cohort, rows: Tensor, split: str = "train") -> tuple[list[Tensor], list[Tensor]]:
    """Return the features of all samples of each client, and their classes, in evaluation mode.

    Args:
        cohort: The clients.
        rows: One row for all clients [P], or one for each [K, P].
        split: The split.

    Returns:
        For each client the features [n_i, F] and the classes [n_i].
    """
    federation = cohort.federation
    index = [torch.from_numpy(federation.splits[split][client]).to(cohort.device) for client in cohort.ids.tolist()]
    return cohort.forward(rows, FlatModel.features, split), [federation.targets[i].long() for i in index]


def class_statistics(features: list[Tensor], labels: list[Tensor], num_classes: int) -> ClassStatistics:
    """Return the statistics of features [n_i, F] with classes [n_i] of each client."""
    classes = torch.arange(num_classes, device=labels[0].device)
    hot = [(y == classes[:, None]).to(z) for z, y in zip(features, labels)]  # [C, n_i] each
    counts = torch.stack([h.sum(1) for h in hot])  # [K, C]
    present = counts.clamp_min(1)
    sums = torch.stack([h @ z for h, z in zip(hot, features)])  # [K, C, F]
    squares = torch.stack([h @ z.square().sum(1) for h, z in zip(hot, features)])  # [K, C]
    return ClassStatistics(counts, sums / present[..., None], squares / present)


def mean_prototypes(cohort: Cohort, means: Tensor, counts: Tensor, by_samples: bool) -> tuple[Tensor, Tensor]:
    """Return the server's mean of uploaded class means, and whether each class has one.

    Args:
        cohort: The clients.
        means: Class means of the clients.  # [K, C, F]
        counts: Numbers of samples, which may be noisy.  # [K, C]
        by_samples: Whether clients are weighted by their samples of the class.  False: equally.

    Returns:
        The prototypes [C, F], 0 for a class that no client has, and 0 or 1 for each class [C].
    """
    shares = counts.clamp_min(0) if by_samples else (counts > 0).float()  # [K, C]
    total = cohort.sum(shares)  # [C]
    return cohort.sum(shares[..., None] * means) / total.clamp_min(1e-12)[:, None], (total > 0).float()
