"""Clients that come after training: each copies the global model and adapts it, epoch by epoch.

Luo et al., ICCV 2023 (PGFed), "adaptive ability on new clients", as its released code does it: of 100 clients the
last 20 take no part in the rounds; then each is evaluated with the global model (epoch 0) and trains all columns
with the plain loss by SGD whose momentum begins anew every epoch; the mean accuracy of the 20 after every epoch is
the curve, its best epoch the bar.  Departs from that code: where a part of the model never reaches the server
(Algorithm.newcomer_row), clients' parts are averaged; the code adds them up and does not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import RunError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining
from fedbench.simulation import evaluate
from fedbench.simulation.csv_table import CsvTable
from fedbench.tasks import scores

FILE = "new_clients.csv"


def starting_row(algorithm: Algorithm, engine: Engine) -> Tensor:
    """What a new client copies when the rounds are over, of whom nothing is known.  # [P]"""
    with torch.no_grad():
        return algorithm.newcomer_row(_trained_clients(engine))


def starting_rows(algorithm: Algorithm, engine: Engine) -> Tensor:
    """What each of the run's new clients copies when the rounds are over, or all of them.  # [M, P] or [P]"""
    welcoming, ids = _with_new_clients(engine)
    with torch.no_grad():
        return algorithm.newcomer_rows(
            Cohort(welcoming, ids, engine.rounds - 1, "new clients"), _trained_clients(engine)
        )


def _trained_clients(engine: Engine) -> list[Cohort]:
    """All clients that took part, a few at a time."""
    slices = evaluate.slices(engine, np.arange(engine.federation.num_clients))
    return [Cohort(engine, slice_ids, engine.rounds - 1, "evaluation") for slice_ids in slices]


def _with_new_clients(engine: Engine) -> tuple[Engine, np.ndarray]:
    """The engine of everybody, and who of them is new.  # ids [M]"""
    assert engine.with_new_clients is not None
    ids = np.arange(engine.federation.num_clients, engine.with_new_clients.num_clients)
    return replace(engine, federation=engine.with_new_clients), ids


def adapt(
    engine: Engine, row: Tensor, epochs: int, lr: float, momentum: float, pause: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The new clients' ids [M] and test metrics before the first epoch and after each, [epochs + 1, M] each.

    row: from which all start [P], or each one's [M, P].  pause: called between epochs; it may raise.
    """
    everybody, ids = _with_new_clients(engine)
    adapting = replace(everybody, optimizer=SGD(lr, momentum=momentum))
    first = engine.federation.num_clients
    curves = [
        _adapt(adapting, slice_ids, row if row.dim() == 1 else row[slice_ids - first], epochs, pause)
        for slice_ids in evaluate.slices(adapting, ids)
    ]
    return ids, {name: np.concatenate([c[name] for c in curves], axis=1) for name in curves[0]}


def _adapt(
    engine: Engine, ids: np.ndarray, row: Tensor, epochs: int, pause: Callable[[], None]
) -> dict[str, np.ndarray]:
    curve: list[dict[str, np.ndarray]] = []
    for epoch in range(epochs + 1):
        pause()
        cohort = Cohort(engine, ids, epoch, "new clients")
        curve.append(evaluate.score(cohort, row, None, "test"))
        if epoch < epochs:
            row = _epoch(cohort, row)
    return {name: np.stack([c[name] for c in curve]) for name in curve[0]}


def _epoch(cohort: Cohort, row: Tensor) -> Tensor:
    """One more epoch from row [P] or [k, P].  # [k, P]"""
    try:
        return cohort.train(row, how=LocalTraining(epochs=1, key="new clients")).theta
    except RunError as error:
        raise RunError(f"while new clients adapted: {str(error).replace('optimizer.lr', 'new_clients.lr')}") from error


def write(path: Path, ids: np.ndarray, curves: dict[str, np.ndarray], sizes: dict[str, np.ndarray]) -> None:
    """Write a CSV file with a row per epoch and client.  sizes: [M] each, and names; curves: [epochs + 1, M]."""
    table = CsvTable(path, -1)
    for epoch in range(len(next(iter(curves.values())))):
        columns = {"client": ids, **sizes, **{name: values[epoch] for name, values in curves.items()}}
        table.append({"epoch": epoch, **{name: c[i] for name, c in columns.items()}} for i in range(len(ids)))
    table.close()


def summary(curves: dict[str, np.ndarray], num_test: np.ndarray, primary: str = "accuracy") -> dict[str, Any]:
    """Return the mean primary score over the new clients: before training, at its best (with the epoch) and at the end.

    counted: the number of clients in the mean, if the score is undefined for some.
    """
    means = [scores.over_clients({primary: values}, num_test) for values in curves[primary]]
    curve = [mean[primary] for mean in means]
    best_of = np.nanargmax if scores.direction(primary).higher_is_better else np.nanargmin
    best = int(best_of(curve)) if not np.isnan(curve).all() else 0
    return {
        "count": len(num_test),
        **({"counted": counted} if (counted := scores.counts(means[best]).get(primary)) is not None else {}),
        "epochs": len(curve) - 1,
        "epoch0": curve[0],
        "best": curve[best],
        "best_epoch": best,
        "last": curve[-1],
    }
