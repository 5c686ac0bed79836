"""What a data set asks of a model: the per-sample loss and what its outputs mean.

Outputs and targets carry any leading axes: [B, ...] for one client, [k, B, ...] for many.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from fedbench.options import ConfigError


class Task(Protocol):
    """loss: per sample, before any weight; outputs(num_classes): width of the model's last layer."""

    name: str

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor: ...


def mask_logits(logits: Tensor, class_mask: Tensor | None, value: float = float("-inf")) -> Tensor:
    """Logits [k, B, C] with the classes a client does not have, class_mask [k, C] False, set to value."""
    return logits if class_mask is None else logits.masked_fill(~class_mask.unsqueeze(-2), value)


class Classification:
    """Cross-entropy; y [..., B] int64, logits [..., B, C]."""

    name = "classification"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        logits = mask_logits(logits, class_mask)
        flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="none")
        return flat.view(y.shape)                                                       # [..., B]


class MultiLabel:
    """Binary cross-entropy, mean over the client's own classes; y [..., B, C] float, logits [..., B, C]."""

    name = "multilabel"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, y, reduction="none")          # [..., B, C]
        if class_mask is None:
            return each.mean(-1)
        mask = class_mask.unsqueeze(-2)
        return (each * mask).sum(-1) / mask.sum(-1)


class Segmentation:
    """Cross-entropy, mean over pixels; y [..., B, H, W] int64, logits [..., B, C, H, W]."""

    name = "segmentation"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        if class_mask is not None:
            logits = logits.masked_fill(~class_mask[:, None, :, None, None], float("-inf"))
        each = F.cross_entropy(logits.reshape(-1, *logits.shape[-3:]), y.reshape(-1, *y.shape[-2:]),
                               reduction="none")
        return each.mean((-2, -1)).view(y.shape[:-2])                                   # [..., B]


TASKS = {task.name: task for task in (Classification(), MultiLabel(), Segmentation())}


def make_task(name: str) -> Task:
    if name not in TASKS:
        raise ConfigError(f"the data set's task is {name!r}; fedbench knows {', '.join(TASKS)}")
    return TASKS[name]
