"""Means of clients' uploads, and estimates of them by aggregation rules."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.aggregators.base import Aggregator
from fedbench.core import rng
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
    weights = _group_weights(mean_weights(context, weights), groups)
    if uploads.dim() <= 2:
        return weights @ uploads
    return (weights @ uploads.flatten(1)).unflatten(-1, uploads.shape[1:])


def robust_mean(
    context: RoundContext,
    aggregator: Aggregator,
    uploads: Tensor,
    weights: Literal["samples", "uniform"] | Tensor,
    groups: Tensor | None,
    center: Tensor | None,
) -> Tensor:
    """Return the estimate of `mean` by an aggregation rule.

    A client with weight 0 is left out.  If given weights sum to s, the result is s times the rule's estimate.

    Args:
        context: The clients.
        aggregator: The rule.
        uploads: One row per client.  # [K, ...]
        weights: "samples", "uniform" (1 / K), or a tensor of weights, which is not normalized.  # [K]
        groups: Whether each client is in each of M groups, to each of which the rule is applied.  None: one group of
            all clients.  # [M, K]
        center: The value that the server sent and that the result replaces, or None.  # [...]

    Returns:
        The estimate, or that of each group.  # [...] or [M, ...]
    """
    rows = uploads.reshape(len(uploads), -1)  # [K, p]
    center = None if center is None else center.flatten()
    # random numbers by which the uploads are ordered for buckets  [K]
    keys = rng.client_keys(rng.key(context.seed, "bucketing", context.round), context.ids)

    def estimate(w: Tensor, total: Tensor | None) -> Tensor:
        """Return the rule's estimate [p] for those clients of the outer function with positive weights; 0 for none.

        Args:
            w: The weights.  # [K]
            total: Their sum, by which the result is multiplied, because the rule gets weights of sum 1.  None: 1.
        """
        # of the outer function: the uploads `rows`, the random `keys` of the clients, and `center`
        members = torch.nonzero(w)[:, 0]  # positions of these clients
        if not len(members):
            return torch.zeros_like(rows[0])
        uploads_of, w_of = (rows, w) if len(members) == len(w) else (rows[members], w[members])  # without copies of all
        order = torch.from_numpy(np.argsort(keys[members.cpu().numpy()])).to(rows.device)  # random, for buckets
        if total is None:
            return aggregator.aggregate(uploads_of, w_of, center, order)
        return total * aggregator.aggregate(uploads_of, w_of / total, center, order)

    of_clients = _group_weights(mean_weights(context, weights), groups)  # [K] or [M, K]
    if groups is not None:
        return torch.stack([estimate(w, total=None) for w in of_clients]).view(-1, *uploads.shape[1:])
    total = of_clients.sum() if isinstance(weights, Tensor) else None
    return estimate(of_clients, total).view(uploads.shape[1:])


def finite_rows(uploads: Tensor) -> Tensor:
    """Return for each client whether all values of its upload, uploads[i] of [K, ...], are finite.  # [K] bool"""
    rows = uploads.reshape(len(uploads), -1)
    is_finite = torch.isfinite(rows.sum(1))  # the sum may be infinite for very large values, too
    if not bool(is_finite.all()):
        is_finite = torch.isfinite(rows).all(1)
    return is_finite


def _group_weights(weights: Tensor, groups: Tensor | None) -> Tensor:
    """Return the weights of the clients in a mean, or in the mean of each group.

    Args:
        weights: The weights of the clients in a mean.  # [K]
        groups: Whether each client is a member of each of M groups, [M, K]; None for a single mean.

    Returns:
        Without groups, `weights` unchanged [K].  Else the weights in each group [M, K], which sum to 1 in each row, or
        to 0 for a group without clients.
    """
    if groups is None:
        return weights
    members = groups.to(weights) * weights  # weight of each client in each group, else 0  [M, K]
    # normalized in each group; without clients 0 / tiny = 0
    return members / members.sum(1, keepdim=True).clamp_min(torch.finfo(members.dtype).tiny)


def mean_weights(context: RoundContext, weights: Literal["samples", "uniform"] | Tensor) -> Tensor:
    """Return the weight of each client in a mean.  A given tensor is returned as it is.

    Args:
        context: The clients.
        weights: "samples": by the number of training samples, or 1 / K with client_weights=uniform.  "uniform":
            1 / K.  A tensor: these weights.  # [K]

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
