"""New clients, which take no part in training: each adapts the global model for some local epochs.

The protocol is "adaptive ability on new clients" of Luo et al., ICCV 2023 (PGFed), as in its released code.  Of 100
clients, the last 20 take no part in the rounds.  Afterwards each is evaluated with the global model (epoch 0) and
trains all parameters by SGD, whose momentum is reset every epoch.  The paper plots the mean accuracy of the 20 clients
after each epoch, and reports the best epoch.

Departs from that code: parameters that never reach the server (Algorithm.initial_row_for_new_clients) are averaged over
the trained clients.  The code sums them without dividing.

Letters: M new clients, P parameters.
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
    """Return the model parameters [P] from which every new client starts after training, whatever its data are."""
    with torch.no_grad():
        return algorithm.initial_row_for_new_clients(_trained_clients(engine))


def starting_rows(algorithm: Algorithm, engine: Engine) -> Tensor:
    """Return the model parameters from which the M new clients of the run start after training.

    Args:
        algorithm: The federated method, such as FedAvg.
        engine: The engine of the training clients.

    Returns:
        One row per new client [M, P], or one row [P] that all share.
    """
    engine_of_all, ids = _with_new_clients(engine)
    new_clients = Cohort(engine_of_all, ids, engine.rounds - 1, "new clients")  # after the last round
    with torch.no_grad():
        return algorithm.initial_rows_for_new_clients(new_clients, _trained_clients(engine))


def _trained_clients(engine: Engine) -> list[Cohort]:
    """Return all training clients, ascending, as cohorts of the last round in the mode "evaluation".

    Each has as many clients as `evaluate.slices` allows.
    """
    slices = evaluate.slices(engine, np.arange(engine.federation.num_clients))
    return [Cohort(engine, slice_ids, engine.rounds - 1, "evaluation") for slice_ids in slices]


def _with_new_clients(engine: Engine) -> tuple[Engine, np.ndarray]:
    """Return an engine whose federation also has the new clients, and the ids of these, the M highest ones.

    Args:
        engine: The engine of the training clients.

    Returns:
        The engine, and the ids [M] int64.
    """
    assert engine.with_new_clients is not None
    ids = np.arange(engine.federation.num_clients, engine.with_new_clients.num_clients)
    return replace(engine, federation=engine.with_new_clients), ids


def adapt(
    engine: Engine, row: Tensor, epochs: int, lr: float, momentum: float, pause: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Train the new clients, and evaluate them on their test samples after each epoch.

    Args:
        engine: The engine of the run.
        row: The model parameters [P] from which all start, or one row per client [M, P].
        epochs: The number of local epochs.
        lr: The learning rate of SGD.
        momentum: The momentum of SGD, reset every epoch.
        pause: Called before each epoch.  It may raise to stop.

    Returns:
        The ids of the new clients [M]; and their test metrics by name, [epochs + 1, M] each, from epoch 0 (before
        training) on.
    """
    engine_of_all, ids = _with_new_clients(engine)
    adapting = replace(engine_of_all, optimizer=SGD(lr, momentum=momentum))
    num_trained = engine.federation.num_clients  # new clients have the ids num_trained, num_trained + 1, ...
    curves = [
        _adapt(adapting, slice_ids, row if row.dim() == 1 else row[slice_ids - num_trained], epochs, pause)
        for slice_ids in evaluate.slices(adapting, ids)
    ]
    return ids, {name: np.concatenate([c[name] for c in curves], axis=1) for name in curves[0]}


def _adapt(
    engine: Engine, ids: np.ndarray, row: Tensor, epochs: int, pause: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Train and evaluate one slice of the new clients.

    Args:
        engine: The engine, with the optimizer of the adaptation.
        ids: The clients [k].
        row: The model parameters [P] from which all start, or one row per client [k, P].
        epochs: The number of local epochs.
        pause: Called before each epoch.  It may raise to stop.

    Returns:
        Test metrics by name, [epochs + 1, k] each.
    """
    curve: list[dict[str, np.ndarray]] = []
    for epoch in range(epochs + 1):
        pause()
        cohort = Cohort(engine, ids, epoch, "new clients")
        curve.append(evaluate.score(cohort, row, predict=None, split="test"))  # None: the model's forward pass
        if epoch < epochs:
            row = _epoch(cohort, row)
    return {name: np.stack([c[name] for c in curve]) for name in curve[0]}


def _epoch(cohort: Cohort, row: Tensor) -> Tensor:
    """Train clients for one epoch, and return their trained rows [k, P].

    Args:
        cohort: The k clients.
        row: The model parameters [P] from which all start, or one row per client [k, P].

    Raises:
        RunError: The training diverged.  The message names new_clients.lr, which is the learning rate here.
    """
    try:
        return cohort.train(row, how=LocalTraining(epochs=1, key="new clients")).theta
    except RunError as error:
        message = str(error).replace("optimizer.lr", "new_clients.lr")
        raise RunError(f"the adaptation of new clients failed: {message}") from error


def write(path: Path, ids: np.ndarray, curves: dict[str, np.ndarray], sizes: dict[str, np.ndarray]) -> None:
    """Write a CSV file with one line per epoch and client.

    Args:
        path: The file.
        ids: The new clients [M].
        curves: Metrics by name, [epochs + 1, M] each.
        sizes: From column to numbers of samples or client names, [M] each.
    """
    table = CsvTable(path, last_round=-1)  # an existing file is emptied
    for epoch in range(len(next(iter(curves.values())))):
        columns = {"client": ids, **sizes, **{name: values[epoch] for name, values in curves.items()}}  # [M] each
        table.append({"epoch": epoch, **{name: columns[name][i] for name in columns}} for i in range(len(ids)))
    table.close()


def summary(curves: dict[str, np.ndarray], num_test: np.ndarray, primary: str = "accuracy") -> dict[str, Any]:
    """Return the mean primary score over the new clients: before training, at the best epoch, and at the end.

    Args:
        curves: Metrics by name, [epochs + 1, M] each.
        num_test: Numbers of test samples [M].
        primary: The name of the primary score.

    Returns:
        Values for summary.json.  `counted` is the number of clients in the mean, if the score is undefined for some.
    """
    means = [scores.summarize_clients({primary: values}, num_test) for values in curves[primary]]
    curve = [mean[primary] for mean in means]
    best_of = np.nanargmax if scores.direction(primary).higher_is_better else np.nanargmin
    best = int(best_of(curve)) if not np.isnan(curve).all() else 0
    num_averaged = scores.defined_counts(means[best]).get(primary)
    return {
        "count": len(num_test),
        **({} if num_averaged is None else {"counted": num_averaged}),
        "epochs": len(curve) - 1,
        "epoch0": curve[0],
        "best": curve[best],
        "best_epoch": best,
        "last": curve[-1],
    }
