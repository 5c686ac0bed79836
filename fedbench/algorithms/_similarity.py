"""Who is near whom: sketches that clients make of their training data, and networks of clients.

pFedNet (fedbench/algorithms/pfednet.py) draws samples at random and links each client to the k nearest ones, and says
neither what of the samples is compared nor how.  Sketches of its released code:
label_hist (its tables): the shares of the classes, here of the client's own samples, there of all;
second_moment (its patches): X' X / n of the pixels X [n, h w], less the mean of all of them;
sample_mean (its segmentation): the mean image over samples and channels [h w].
feature_mean, ours: the mean input [c h w].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Cohort, FlatModel, Inputs

Sketch = Literal["label_hist", "feature_mean", "second_moment", "sample_mean"]
Metric = Literal["l1", "l2"]


# -- sketches --------------------------------------------------------------------------------------------
def sketches(cohort: Cohort, kind: Sketch, samples: int | None) -> Tensor:
    """What each client of the cohort tells of its training data.  # [K, q]

    samples: of how many at most, drawn at random (None: of all); the labels of all are counted.
    """
    if kind == "label_hist":
        counts = torch.from_numpy(cohort.federation.label_counts[cohort.ids]).to(cohort.device).float()  # [K, C]
        return counts / counts.sum(1, keepdim=True).clamp_min(1)
    nothing = cohort.model.init_row()  # a pass wants a row, and the inputs are all that is read
    each = cohort.forward(nothing, _pixels, split="train", limit=samples, key="sketch")  # [n_i, c, h w] each
    return torch.stack([_sketch_of(x, kind) for x in each])


def _pixels(model: FlatModel, rows: Tensor, inputs: Inputs) -> Tensor:
    """Inputs [k, b, ...] as [k, b, c, p]: an image's channels and pixels; of anything else one channel."""
    several = isinstance(inputs, dict)
    parts = list(inputs.values()) if several else [inputs]
    if not several and parts[0].dim() == 5:
        return parts[0].flatten(3)
    return torch.cat([x.reshape(*x.shape[:2], -1).float() for x in parts], 2)[:, :, None]


def _sketch_of(x: Tensor, kind: Sketch) -> Tensor:
    """The sketch of samples x [n, c, p].  # [q]"""
    if kind == "feature_mean":
        return x.mean(0).flatten()
    if kind == "sample_mean":
        return x.mean((0, 1))
    X = (x - x.mean()).flatten(0, 1)  # [n c, p]
    return (X.T @ X / len(X)).flatten()


# -- networks: adjacencies [N, N] bool, symmetric, without loops ------------------------------------------
def nearest(of: Tensor, among: Tensor, k: int, metric: Metric, themselves: bool = False) -> Tensor:
    """The k rows of `among` [m, q] nearest to each row of `of` [n, q], of equally near ones the first; all, where there
    are fewer.  themselves: row i of both is the same client, who is not its own neighbour.  # [n, k]"""
    mode = "donot_use_mm_for_euclid_dist"  # whose distance of equal rows is 0
    distances = torch.cdist(of.double(), among.double(), {"l1": 1.0, "l2": 2.0}[metric], compute_mode=mode)  # [n, m]
    if themselves:
        distances.fill_diagonal_(float("inf"))
    return distances.argsort(dim=1, stable=True)[:, : min(k, len(among) - themselves)]


def knn(sketches: Tensor, k: int, metric: Metric) -> Tensor:
    """Return the pairs of clients of which one is among the k nearest of the other.  # [N, N]"""
    neighbours = nearest(sketches, sketches, k, metric, themselves=True)  # [N, k]
    n = len(sketches)
    lists = torch.zeros(n, n, dtype=torch.bool, device=sketches.device).scatter_(1, neighbours, True)
    return lists | lists.T


def of_edges(n: int, edges: Sequence[Sequence[int]]) -> Tensor:
    """The pairs of clients that are listed, each in either order."""
    adjacency = torch.zeros(n, n, dtype=torch.bool)
    for i, j in edges:
        adjacency[i, j] = adjacency[j, i] = True
    return adjacency


# -- how far personal parameters are from each other -------------------------------------------------------
def sdwd(z: Tensor) -> Tensor:
    """Standard deviation of weights' difference: of every coordinate, over the clients of z [N, d].  # [d]"""
    return z.std(0, correction=0)


def sdwd_pairwise(z: Tensor, adjacency: Tensor) -> Tensor:
    """The same over the differences z_i - z_j at the ends of edges, which come with both signs: their root mean square;
    0 without edges.  # [d]"""
    i, j = adjacency.triu(1).nonzero().T
    return (z[i] - z[j]).square().mean(0).sqrt() if len(i) else torch.zeros_like(z[0])
