"""Means of clients' uploads."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedbench.core.round_context import RoundContext


def mean(
    context: RoundContext,
    uploads: Tensor,
    weights: Literal["samples", "uniform"] | Tensor = "samples",
    groups: Tensor | None = None,
) -> Tensor:
    """Return the mean of the clients' uploads.

    Args:
        context: The clients.
        uploads: One row per client.  # [K, ...]
        weights: "samples": by the number of training samples, or 1 / K with client_weights=uniform.  "uniform":
            1 / K.  A tensor: these weights, not normalized.  # [K]
        groups: Whether each client is in each of M groups.  A group without clients has the mean 0.  # [M, K]

    Returns:
        The mean, or the mean of each group.  # [...] or [M, ...]
    """
    weights = mean_weights(context, weights)
    if groups is not None:
        members = groups.to(weights) * weights  # weight of each client in each group, else 0  [M, K]
        # normalized in each group; without clients 0 / tiny = 0
        weights = members / members.sum(1, keepdim=True).clamp_min(torch.finfo(members.dtype).tiny)
    if uploads.dim() <= 2:
        return weights @ uploads
    return (weights @ uploads.flatten(1)).unflatten(-1, uploads.shape[1:])


def mean_weights(context: RoundContext, weights: Literal["samples", "uniform"] | Tensor) -> Tensor:
    """Return the weight of each client in a mean.  A given tensor is returned as it is.

    Args:
        context: The clients.
        weights: As in `mean`.

    Returns:
        The weights.  # [K]
    """
    if isinstance(weights, Tensor):
        return weights
    if weights == "samples":
        return context.mean_weights
    return torch.full((len(context),), 1 / len(context), device=context.device)


def total(uploads: Tensor) -> Tensor:
    """Return the sum over clients of their uploads [K, ...], without weights.  # [...]"""
    return uploads.sum(0)
