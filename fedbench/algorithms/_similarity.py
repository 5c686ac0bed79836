"""Similarity of clients: sketches of their training data, and networks that link similar clients.

pFedNet (fedbench/algorithms/pfednet.py) draws random samples and links each client to its k nearest clients.  The paper
does not state what is compared.  Sketches of its released code:
label_hist (its tables): class shares, here relative to the client's samples, there to all samples;
second_moment (its patches): X' X / n of the pixels X [n, h w], after subtracting their overall mean;
sample_mean (its segmentation): the mean image over samples and channels [h w].
feature_mean (ours): the mean input [c h w].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbench.algorithms.base import Cohort, FlatModel, Inputs
from fedbench.core.inputs import wrap_inputs

Sketch = Literal["label_hist", "feature_mean", "second_moment", "sample_mean"]
Metric = Literal["l1", "l2"]


# -- sketches --------------------------------------------------------------------------------------------
def sketches(cohort: Cohort, kind: Sketch, samples: int | None) -> Tensor:
    """Compute a sketch of each client's training data, a vector by which clients are compared.

    Args:
        cohort: The clients.
        kind: "label_hist", shares of the classes; "feature_mean", the mean input over samples; "sample_mean", the mean
            over samples and channels; "second_moment", the second moments of pixels.
        samples: Maximum number of random samples per client; None uses all.  label_hist always counts all labels.

    Returns:
        One sketch of q numbers per client.  # [K, q]
    """
    if kind == "label_hist":
        counts = torch.from_numpy(cohort.federation.label_counts[cohort.ids]).to(cohort.device).float()  # [K, C]
        return counts / counts.sum(1, keepdim=True).clamp_min(1)
    unused = cohort.model.init_row()  # `forward` requires a row; only the inputs are read
    each = cohort.forward(unused, _pixels, split="train", limit=samples, key="sketch")  # [n_i, c, h w] each
    return torch.stack([_sketch_of(x, kind) for x in each])


def _pixels(model: FlatModel, rows: Tensor, inputs: Inputs) -> Tensor:
    """Return inputs of any shape as samples with channels and pixels.

    Args:
        model: Unused, required by `cohort.forward`.
        rows: Unused, required by `cohort.forward`.
        inputs: Images [k, b, c, h, w], or other inputs, whose numbers count as the pixels of one channel.

    Returns:
        The inputs.  # [k, b, c, pixels]
    """
    if isinstance(inputs, Tensor) and inputs.dim() == 5:
        return inputs.flatten(3)
    arrays = wrap_inputs(inputs).values()  # one array [k, b, ...], or several
    return torch.cat([x.reshape(*x.shape[:2], -1).float() for x in arrays], 2)[:, :, None]


def _sketch_of(x: Tensor, kind: Sketch) -> Tensor:
    """Return the sketch of one client's samples, a vector by which clients are compared.

    Args:
        x: Samples with c channels of p pixels.  # [n, c, p]
        kind: "feature_mean", "sample_mean" or "second_moment".

    Returns:
        A vector of q = c p (feature_mean), p (sample_mean) or p^2 (second_moment) numbers.  # [q]
    """
    if kind == "feature_mean":
        return x.mean(0).flatten()  # over samples
    if kind == "sample_mean":
        return x.mean((0, 1))  # over samples and channels
    X = (x - x.mean()).flatten(0, 1)  # [n c, p]; the released code subtracts one mean of all pixels
    return (X.T @ X / len(X)).flatten()


# -- networks: adjacencies [N, N] bool, symmetric, without loops ------------------------------------------
def nearest(of: Tensor, among: Tensor, k: int, metric: Metric, themselves: bool = False) -> Tensor:
    """Find the nearest neighbours of each sketch.

    Args:
        of: Sketches of n clients.  # [n, q]
        among: Sketches of m candidates.  # [m, q]
        k: Number of neighbours; all candidates if there are fewer.
        metric: Distance, "l1" or "l2".
        themselves: Whether row i of both is the same client.  It is then not its own neighbour.

    Returns:
        Indices into `among`, nearest first; ties go to the lower index.  # [n, k]
    """
    mode = "donot_use_mm_for_euclid_dist"  # exact: equal rows have distance 0
    distances = torch.cdist(of.double(), among.double(), {"l1": 1.0, "l2": 2.0}[metric], compute_mode=mode)  # [n, m]
    if themselves:
        distances.fill_diagonal_(float("inf"))
    # one candidate less, without itself
    return distances.argsort(dim=1, stable=True)[:, : min(k, len(among) - themselves)]


def knn(sketches: Tensor, k: int, metric: Metric) -> Tensor:
    """Link two clients if one of them is among the k nearest clients of the other.

    Args:
        sketches: Sketches of all clients.  # [N, q]
        k: Number of nearest clients.
        metric: Distance of sketches, "l1" or "l2".

    Returns:
        The adjacency.  # [N, N] bool
    """
    # themselves: a client is not its own neighbour
    neighbours = nearest(sketches, sketches, k, metric, themselves=True)  # [N, k]
    n = len(sketches)
    is_neighbour = torch.zeros(n, n, dtype=torch.bool, device=sketches.device)
    is_neighbour.scatter_(1, neighbours, value=True)  # whether client j is among the neighbours of client i
    return is_neighbour | is_neighbour.T


def of_edges(n: int, edges: Sequence[Sequence[int]]) -> Tensor:
    """Return the adjacency matrix of n clients.

    Args:
        n: Number of clients.
        edges: Pairs (i, j) of client ids from 0 to n - 1.

    Returns:
        A matrix that is True at [i, j] and [j, i] for each pair, and else False.  # [n, n] bool
    """
    adjacency = torch.zeros(n, n, dtype=torch.bool)
    for i, j in edges:
        adjacency[i, j] = adjacency[j, i] = True
    return adjacency


# -- spread of the personal parameters -----------------------------------------------------------------------
def sdwd(z: Tensor) -> Tensor:
    """Return pFedNet's "standard deviation of weights' difference" (SDWD) of z [N, d].

    It is the standard deviation of each coordinate over the clients.  # [d]
    """
    return z.std(0, correction=0)


def sdwd_pairwise(z: Tensor, adjacency: Tensor) -> Tensor:
    """Return the root mean square of z_i - z_j over the edges (i, j), for each coordinate; 0 without edges.

    It is pFedNet's standard deviation of weights' difference (SDWD) over linked clients: the standard deviation of
    the differences if each one counts twice, as z_i - z_j and as z_j - z_i.

    Args:
        z: Personal parameters.  # [N, d]
        adjacency: Edges.  # [N, N] bool

    Returns:
        Values of all coordinates.  # [d]
    """
    i, j = adjacency.triu(1).nonzero().T
    return (z[i] - z[j]).square().mean(0).sqrt() if len(i) else torch.zeros_like(z[0])
