"""Probabilities of classes and their divergence, for methods in which two models teach each other."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedbench.algorithms.base import Batch, Federation
from fedbench.core.options import require

ABSENT = -1e9  # logit of a class that a client does not have

Reduction = Literal["sum", "mean"]


def require_classes(federation: Federation, name: str) -> None:
    """Require a data set with one class per sample or pixel.

    Args:
        federation: The clients and their data.
        name: The method's name in the option algorithm.

    Raises:
        ConfigError: Targets are not classes.
    """
    has_classes = bool(federation.label_counts.any())  # all counts are 0 if targets are not classes
    require(
        has_classes and not federation.task.has_stochastic_inputs,  # diffusion draws its inputs at random
        f"algorithm={name} needs one class per sample or pixel, not task={federation.task.kind}: choose a data set "
        "for classification or segmentation, or another algorithm",
    )


def log_probabilities(logits: Tensor, batch: Batch) -> Tensor:
    """Return the log softmax of logits over the classes that each client has.

    Args:
        logits: Logits of k clients.  # [k, B, C] or [k, B, C, ...] for pixels
        batch: Their batch.  If `batch.class_mask` [k, C] is not None, it is False for classes that a client lacks.

    Returns:
        Log probabilities; about -1e9 for a class that the client lacks.  # as logits
    """
    if batch.class_mask is not None:
        shape = (len(logits), 1, -1, *[1] * (logits.dim() - 3))  # [k, 1, C, 1 ...]: for all samples and pixels
        logits = logits.masked_fill(~batch.class_mask.view(shape), ABSENT)  # -1e9
    return logits.float().log_softmax(2)


def kl(log_p: Tensor, log_q: Tensor, over_classes: Reduction) -> Tensor:
    """Return KL(p || q) of each sample; in segmentation, the mean over its pixels.

    Args:
        log_p: Log probabilities p.  # [k, B, C, ...]
        log_q: Log probabilities q.  # [k, B, C, ...]
        over_classes: "sum" is the divergence; "mean" divides it by C, as some released codes do.

    Returns:
        The divergences.  # [k, B]
    """
    each = log_p.exp() * (log_p - log_q)  # [k, B, C, ...]
    total = each.sum(2) if over_classes == "sum" else each.mean(2)  # [k, B, ...]
    return total.unsqueeze(2).flatten(2).mean(2)  # mean over pixels, if there are any
