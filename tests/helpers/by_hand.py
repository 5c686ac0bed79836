"""Problems on which the rounds of a method can be followed by hand, for the tests of single methods.

Most are least squares: client i's risk is f_i(theta) = 0.5 mean ||theta - b_i||^2, its gradient theta - b_i, and n
full-batch steps of rate r lead from w to b_i + (1 - r)^n (w - b_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny import HEAD, SIZES, Point, engine, engine_on, mlp, ragged, targets_federation
from torch import Tensor, nn

from fedbench.algorithms.base import Algorithm
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD, Optimizer
from fedbench.nn.flat import FlatModel

COHORTS = ([0, 2, 3], [1, 2], [0, 4, 5])
COHORTS_OF_FOUR = ([0, 1, 3, 5], [1, 2, 3, 4], [0, 2, 4, 5], [0, 1, 3, 4])

# The least squares of `squares`: b_i of three clients, numbers and shares of their samples, the first row.
LR = 0.1
B = torch.tensor([[2.0, 1.0, 0.0], [-1.0, 0.0, 3.0], [0.0, 4.0, 1.0]])
NUMBERS = (1, 3, 2)
P = torch.tensor(NUMBERS) / 6
START = (1.0, -2.0, 0.5)
W = torch.tensor(START)


# -- networks --------------------------------------------------------------------------------------------
def six_clients(
    optimizer: Optimizer | None = None, sizes: Sequence[int] = SIZES, columns: dict | None = None, **options: Any
) -> Engine:
    """Ragged classification, a network of two layers, of which there are independent draws."""
    arrays, split = ragged(sizes)
    model = FlatModel(mlp(), columns or HEAD, new_module=lambda *key: mlp(seed=key[-1] + (1 if len(key) == 1 else 100)))
    return engine(arrays, split, model, optimizer or SGD(lr=LR), **options)  # type: ignore[arg-type]


def four_of_six(optimizer: Optimizer | None = None, columns: dict | None = None, **options: Any) -> Engine:
    """The same with four clients a round, and momentum that is kept."""
    optimizer = optimizer or SGD(lr=LR, momentum=0.9, reset="never")
    return six_clients(optimizer, columns=columns, **{"cohort_size": 4, **options})


class Normed(nn.Module):
    """With BatchNorm, whose statistics travel in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class OnlyHead(nn.Module):
    """x -> W x, all of it the head."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(inputs, classes, bias=False)
        self.head.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


# -- least squares ---------------------------------------------------------------------------------------
def squares(steps: int = 1, targets: Tensor = B, numbers: tuple = NUMBERS, **options: Any) -> Engine:
    """Client i has numbers[i] samples, all of them targets[i], and takes `steps` full-batch steps a round from W."""
    federation = targets_federation([np.repeat(b[None].numpy(), n, 0) for b, n in zip(targets, numbers)])
    optimizer = options.pop("optimizer", SGD(lr=LR))
    return engine_on(federation, Point(START), optimizer, batch_size=10, **{"epochs": steps, **options})


def points(
    targets: Sequence[Sequence[Any]],
    lr: float = 0.5,
    start: float | Sequence[float] = 0.0,
    momentum: float = 0.0,
    **options: Any,
) -> Engine:
    """Client i's samples are targets[i], numbers or vectors; rows begin at `start`."""
    begin = [start] if isinstance(start, float) else start
    federation = targets_federation([np.array(t, float).reshape(-1, len(begin)) for t in targets])
    model = FlatModel(Point(begin), new_module=lambda *key: Point([b + 1 + key[-1] for b in begin]))
    return engine_on(federation, model, SGD(lr=lr, momentum=momentum), **{"batch_size": 100, **options})


def descent(w: Tensor, to: Tensor, steps: int, rate: float = LR) -> Tensor:
    """Where `steps` steps of gradient theta - to lead."""
    return to + (1 - rate) ** steps * (w - to)


# -- a base and a head of one number each ----------------------------------------------------------------
class Product(nn.Module):
    """x -> h u x."""

    def __init__(self, u: float, h: float):
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.body.weight.data.fill_(u)
        self.head.weight.data.fill_(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def products(targets: Sequence[float], optimizer: SGD, u: float = 1.0, h: float = 2.0, **options: Any) -> Engine:
    """f_i = 0.5 (h u - c_i)^2, of gradients (h u - c_i) h and (h u - c_i) u: rows are [u, h], c_i = targets[i]."""
    federation = targets_federation([np.array([[t]]) for t in targets])
    return engine_on(federation, Product(u, h), optimizer, columns=HEAD, **options)


# -- little words ----------------------------------------------------------------------------------------
def row(*values: float) -> Tensor:
    return torch.tensor(values)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def again(e: Engine, a: Algorithm, round: int = 1, ids: Sequence[int] | None = None) -> Cohort:
    """One more round; returns its cohort."""
    cohort = Cohort(e, np.arange(e.federation.num_clients) if ids is None else np.array(ids), round)
    a.round(cohort)
    return cohort


def state(e: Engine, algorithm: Algorithm) -> dict[str, Tensor]:
    """What the server and all clients keep."""
    n = np.arange(e.federation.num_clients)
    return {**algorithm.state_dict(), **{name: rows[n] for name, rows in e.rows.all.items()}}
