"""FedSLD: its weights by hand, and its limits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import points, row, six_clients
from tiny import (
    close,
    engine,
    mlp,
    play,
    ragged,
)
from torch import Tensor, nn

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedsld import FedSLD
from fedbench.core.options import ConfigError
from fedbench.engine.batch import Batch
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel


def class_balanced(model: FlatModel, w: Tensor, x: Tensor, y: Tensor, prior: Tensor) -> Tensor:
    """Gradient of the sum over the classes of (x, y) of Pt(c) times their mean cross-entropy, written out."""
    leaf = w.clone().requires_grad_()
    each = nn.functional.cross_entropy(model.forward(leaf, x), y, reduction="none")
    loss = sum((prior[c] * each[y == c].mean() for c in y.unique()), torch.zeros(()))
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fedsld_is_a_prior_weighted_class_mean(reduction: Any) -> None:
    """Ragged full batches of 7, 21, 4 samples, padded to 21; "sum" is b times "mean"."""
    e = six_clients(SGD(lr=0.1), batch_size=100)
    f, w, cohort = e.federation, e.model.init_row(), [0, 1, 3]
    prior = torch.from_numpy(f.label_counts.sum(0) / f.label_counts.sum()).float()
    rows = []
    for i in cohort:
        x, y = f.gather(torch.from_numpy(f.splits["train"][i]))
        b = len(y) if reduction == "sum" else 1
        rows.append(w - 0.1 * b * class_balanced(e.model, w, x, y, prior))
    weights = Cohort(e, np.array(cohort), 0).weights
    close(play(e, FedSLD(reduction), 1, [cohort]).w, weights @ torch.stack(rows), 1e-5)


def ratio(y: Sequence[Sequence[int]], real: Sequence[int], prior: Tensor, **options: Any) -> Tensor:
    """FedSLD's Pt(y) / pb(y) on padded batches y of which the first `real` count."""
    slots = torch.arange(len(y[0])) < torch.tensor(real)[:, None]
    weight = slots / torch.tensor(real)[:, None]
    return FedSLD(**options).ratio(Batch(torch.zeros(0), torch.tensor(y), weight, np.array(real)), prior)


def test_fedsld_weights_by_hand() -> None:
    """Pt = (0.5, 0.3, 0.2).  Batch (0, 0, 1, 1 | padding): pb = (1/2, 1/2), so 1, 1, 0.6, 0.6 and nothing for padding;
    the mean of CE so weighted is 0.5 CE_0 + 0.3 CE_1.  Of one class: Pt(c).  Of Pt's own shares: 1 everywhere."""
    prior = row(0.5, 0.3, 0.2)
    close(ratio([[0, 0, 1, 1, 2]], [4], prior), row(1, 1, 0.6, 0.6, 0)[None])
    close(ratio([[2, 2, 2]], [3], prior), row(0.2, 0.2, 0.2)[None])
    close(ratio([[0] * 5 + [1] * 3 + [2] * 2], [10], prior), torch.ones(1, 10))
    close(ratio([[0, 0, 1, 1, 2]], [4], prior, renormalize=True), row(1.25, 1.25, 0.75, 0.75, 0)[None])
    close(ratio([[0, 0, 1, 1, 2]], [4], prior, reduction="sum"), row(4, 4, 2.4, 2.4, 0)[None])


def test_fedsld_does_not_count_copies_within_a_batch() -> None:
    """Every sample of class 0 twice: the classes' weights in the batch stay Pt."""
    prior = row(0.5, 0.3, 0.2)
    for y in ([0, 1, 2, 1], [0, 0, 1, 2, 1]):
        total = ratio([y], [len(y)], prior)[0] / len(y)
        close(torch.zeros(3).scatter_add(0, torch.tensor(y), total), prior)


def test_fedsld_on_even_shares_is_fedavg() -> None:
    """Every client has the federation's class shares, full batches: equal up to rounding; and exactly one client."""
    arrays, split = ragged([6, 12, 9], classes=3)
    arrays.targets[:] = np.arange(len(arrays.targets)) % 3
    runs = []
    for method in (FedSLD, FedAvg):
        e = engine(arrays, split, mlp(), SGD(lr=0.2), batch_size=100, epochs=3)
        runs.append(play(e, method(), 2).w)
    close(*runs, 1e-6)


def test_fedsld_needs_classes() -> None:
    with pytest.raises(ConfigError, match="one class per sample, not task=squares"):
        play(points([[1]]), FedSLD())
