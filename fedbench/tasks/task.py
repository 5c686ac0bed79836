"""What a data set asks of a model: the per-sample loss and what its outputs mean.

Outputs and targets carry any leading axes: [B, ...] for one client, [k, B, ...] for many.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.core.options import ConfigError


class Task(Protocol):
    """loss: per sample, before any weight; output_shape: what a model must return."""

    name: str

    def output_shape(self, y: Tensor, num_classes: int) -> tuple[int, ...]:
        """Of the logits of samples with targets y [B, ...]."""
        return len(y), num_classes

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor: ...

    def loss_and_gradient(self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
                          ) -> tuple[Tensor, Tensor]:
        """Per-sample loss [k, B], and the gradient of sum(weight * loss) with respect to the logits."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self.loss(leaf, y, class_mask)
            grad, = torch.autograd.grad((loss * weight).sum(), leaf)
        return loss.detach(), grad


def mask_logits(logits: Tensor, class_mask: Tensor | None, value: float = float("-inf")) -> Tensor:
    """Logits [k, B, C] with the classes a client does not have, class_mask [k, C] False, set to value."""
    return logits if class_mask is None else logits.masked_fill(~class_mask.unsqueeze(-2), value)


class Classification(Task):
    """Cross-entropy; y [..., B] int64, logits [..., B, C]."""

    name = "classification"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        logits = mask_logits(logits, class_mask)
        z, labels = logits.reshape(-1, logits.shape[-1]), y.reshape(-1)                 # [n, C], [n]
        if _narrow(z):
            return _NarrowCrossEntropy.apply(z, labels).view(y.shape)
        return F.cross_entropy(z, labels, reduction="none").view(y.shape)               # [..., B]

    def loss_and_gradient(self, logits: Tensor, y: Tensor, weight: Tensor, class_mask: Tensor | None
                          ) -> tuple[Tensor, Tensor]:
        """The gradient in closed form: weight * (softmax - one-hot)."""
        z = mask_logits(logits, class_mask).reshape(-1, logits.shape[-1])               # [n, C], n = k B
        label, share, over = y.reshape(-1, 1), weight.reshape(-1, 1), 1
        if _narrow(z):                                                                  # [C, n]
            z, label, share, over = z.t().contiguous(), label.t(), share.t(), 0
        log_p = z.log_softmax(over)
        loss = -log_p.gather(over, label)
        grad = log_p.exp_().mul_(share).scatter_add_(over, label, -share)
        return loss.view(y.shape), (grad if over else grad.t()).view(logits.shape)


def _narrow(z: Tensor) -> bool:
    """Whether logits z [n, C] are better handled with samples along the rows of the vector unit: on a CPU 1.1 times as
    fast at n = 200, 4 times at n = 1,000, C = 10; a third as fast at C = 62."""
    return z.device.type == "cpu" and z.shape[1] <= 32 and len(z) >= 192


class _NarrowCrossEntropy(torch.autograd.Function):
    """Cross-entropy [n] of logits [n, C], computed on [C, n]: 2.3 times as fast on a CPU at n = 1,000, C = 10 (forward
    and backward)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        log_p = z.t().contiguous().log_softmax(0)                                       # [C, n]
        ctx.save_for_backward(log_p, y)
        return -log_p.gather(0, y[None])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_p, y = ctx.saved_tensors
        grad = (log_p.exp() * grads[0]).scatter_add(0, y[None], -grads[0][None])        # [C, n]
        return grad.t(), None


class MultiLabel(Task):
    """Binary cross-entropy, mean over the client's own classes; y [..., B, C] float, logits [..., B, C]."""

    name = "multilabel"

    def loss(self, logits: Tensor, y: Tensor, class_mask: Tensor | None = None) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, y, reduction="none")          # [..., B, C]
        if class_mask is None:
            return each.mean(-1)
        mask = class_mask.unsqueeze(-2)
        return (each * mask).sum(-1) / mask.sum(-1)


class Segmentation(Task):
    """Cross-entropy, mean over pixels; y [..., B, H, W] int64, logits [..., B, C, H, W]."""

    name = "segmentation"

    def output_shape(self, y: Tensor, num_classes: int) -> tuple[int, ...]:
        return len(y), num_classes, *y.shape[1:]

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
