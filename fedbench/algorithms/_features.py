"""Features, the inputs of a model's head, for methods whose losses read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbench.algorithms._heads import require_linear_head
from fedbench.algorithms.base import Batch, Cohort, Federation, FlatModel, Step
from fedbench.core.options import require


def require_features(model: FlatModel, name: str) -> None:
    """Require a head by which logits are computed from features.

    Args:
        model: The model.
        name: The method's name in the option algorithm, for the message.

    Raises:
        ConfigError: The model has no linear layer named head.
    """
    require_linear_head(model, name)


def refuse_features_of_tokens(federation: Federation, name: str) -> None:
    """Refuse models of texts that compute features for each token instead of for the whole sample.

    Args:
        federation: The clients and their data.
        name: The method's name in the option algorithm.

    Raises:
        ConfigError: The outputs of the model are [B, T, C], logits of each of T tokens.
    """
    task = federation.task
    # the target of sample 0, from whose shape and the number of outputs (such as classes) the shape of outputs follows
    _, y = federation.gather(torch.zeros(1, dtype=torch.int64, device=federation.device))
    require(
        len(task.output_shape(y, task.outputs(federation.num_classes))) != 3,
        f"algorithm={name} needs one vector of features per sample, and with task={task.kind} there is one per token: "
        "choose a data set with one target per sample, or algorithm=fedavg",
    )


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
        f"algorithm={name} needs one class per sample, not task={federation.task.kind}: choose a data set for "
        "classification, or another algorithm",
    )


def num_features(model: FlatModel) -> int:
    """Return F, the number of features that the model's linear head (or 1x1 convolution) reads."""
    head = model.module.head
    return head.in_features if isinstance(head, nn.Linear) else head.in_channels  # type: ignore[union-attr]


def features_and_logits(s: Step, rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the features and the logits of each client's batch, by one forward pass in training mode.

    Args:
        s: The local step of k clients.
        rows: Their models, one row each.  # [k, P]
        batch: Their batch.

    Returns:
        Features [k, B, F], and logits [k, B, C].
    """
    z = s.features(rows, batch)
    return z, s.model.head(rows, z)


@torch.no_grad()
def frozen_features(s: Step, rows: Tensor, batch: Batch) -> Tensor:
    """Return the features of each client's batch in evaluation mode, as constants for a loss.

    They have no gradient, because `rows` are other models than the trained ones, and require none.

    Args:
        s: The local step of k clients.
        rows: The models that compute them: one for all clients [P], or one for each [k, P].
        batch: The batch.

    Returns:
        Features, the inputs of the head.  # [k, B, F]
    """
    return s.model.features(rows.expand(s.k, -1), batch.x)  # without a context: evaluation mode


BANDWIDTHS = (10, 15, 20, 50)  # values of a in the kernels exp(-d^2 / 2a), as in PFLlib


def mmd(z: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy between two sets of features.

    The kernel is the sum of the Gaussian kernels exp(-d^2 / 2h) at distance d, for bandwidths h = 10, 15, 20 and 50.

    Args:
        z: Features of a batch.  # [k, B, F]
        other: Other features of the same batch.  # [k, B, F]
        weight: Weights of the samples, of sum 1 and 0 for padding.  # [k, B]

    Returns:
        The discrepancy of each client.  # [k]
    """

    def mean_kernel(x: Tensor, y: Tensor) -> Tensor:  # weighted mean over all pairs of samples  [k]
        d2 = x.square().sum(2)[:, :, None] + y.square().sum(2)[:, None] - 2 * x @ y.mT  # squared distances  [k, B, B]
        kernels = torch.stack([(d2 / (-2 * bandwidth)).exp() for bandwidth in BANDWIDTHS]).sum(0)
        return torch.einsum("kbc,kb,kc->k", kernels, weight, weight)

    return mean_kernel(z, z) + mean_kernel(other, other) - 2 * mean_kernel(z, other)


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
        split: Name of the split, such as "train".

    Returns:
        The features of each client [n_i, F], and the classes of each client [n_i].
    """
    federation = cohort.federation
    # positions of the clients' samples in the data set
    index = [torch.from_numpy(federation.splits[split][client]).to(cohort.device) for client in cohort.ids.tolist()]
    # forward: the function's outputs for all samples of each client
    return cohort.forward(rows, FlatModel.features, split), [federation.targets[i].long() for i in index]


def class_statistics(features: list[Tensor], labels: list[Tensor], num_classes: int) -> ClassStatistics:
    """Return the number, mean and mean squared norm of each client's features of each class.

    Args:
        features: Features of each client's samples.  # [n_i, F] each
        labels: Their classes.  # [n_i] each
        num_classes: Number C of classes.

    Returns:
        Counts, means, and means of squared norms, by client and class.
    """
    classes = torch.arange(num_classes, device=labels[0].device)
    one_hot = [(y == classes[:, None]).to(z) for z, y in zip(features, labels)]  # [C, n_i] each
    counts = torch.stack([h.sum(1) for h in one_hot])  # [K, C]
    divisor = counts.clamp_min(1)  # 1 for absent classes, whose sums are 0
    sums = torch.stack([h @ z for h, z in zip(one_hot, features)])  # [K, C, F]
    squares = torch.stack([h @ z.square().sum(1) for h, z in zip(one_hot, features)])  # [K, C]
    return ClassStatistics(counts, sums / divisor[..., None], squares / divisor)


def mean_prototypes(cohort: Cohort, means: Tensor, counts: Tensor, by_samples: bool) -> tuple[Tensor, Tensor]:
    """Return the server's prototype of each class, the mean of uploaded class means, and which classes have one.

    Args:
        cohort: The clients.
        means: Class means of the clients.  # [K, C, F]
        counts: Numbers of samples.  Noise for privacy may make them negative.  # [K, C]
        by_samples: Whether clients are weighted by their samples of the class.  False: equally.

    Returns:
        The prototypes [C, F], 0 for a class that no client has, and has_prototype [C], 1.0 if a client has the class,
        else 0.0.
    """
    # weight of each client in the mean of each class
    shares = counts.clamp_min(0) if by_samples else (counts > 0).float()  # [K, C]
    total = cohort.sum(shares, exact=True)  # exact: a plain sum also with robust aggregation  [C]
    # 1e-12: no division by 0, for classes that no client has
    return cohort.sum(means, weights=shares) / total.clamp_min(1e-12)[:, None], (total > 0).float()
