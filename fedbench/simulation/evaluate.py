"""Evaluate every client's model on the client's samples, in slices of clients that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import RunError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.full_batch import select_rows
from fedbench.tasks.scores import ATTACK_SUCCESS

SLICE_BYTES = 256 << 20  # memory for the personalized rows of a slice
TRIGGERED = "triggered"  # the split of test samples with the trigger of a backdoor, labelled as the attackers want
MAX_CLIENTS = 1 << 14  # clients whose statistics are in memory at once; each has small tensors of about 3 KB
STATISTICS_BYTES = 64 << 20  # memory for the sample statistics of a task


def slices(engine: Engine, ids: np.ndarray) -> list[np.ndarray]:
    """Split client ids [n] into consecutive slices of at least one client.

    The float32 models of a slice, one per client, fit in SLICE_BYTES.
    """
    size = max(1, SLICE_BYTES // (4 * engine.model.size))  # float32
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def personal(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool, split: str = "test"
) -> dict[str, np.ndarray]:
    """Return the metrics of the model that each client deploys.

    Args:
        algorithm: The federated method, such as FedAvg.
        engine: The engine of the run.
        ids: The clients to evaluate [n].
        round: The round after which to evaluate, from 0.
        final: Whether it is the last round of the run.
        split: "train", "val" or "test".

    Returns:
        Metrics by name, [n] each.
    """
    cohorts = deployed(algorithm, engine, ids, round, final)
    return _concatenated([score(cohort, rows, algorithm.predict, split) for cohort, rows in cohorts])


def personal_and_global(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool
) -> tuple[dict[str, dict[str, np.ndarray]], bool]:
    """Return the test metrics of the deployed models, with which clients predict, and of the global model.

    Args:
        algorithm: The federated method, such as FedAvg.
        engine: The engine of the run.
        ids: The clients to evaluate [n].
        round: The round after which to evaluate, from 0.
        final: Whether it is the last round of the run.

    Returns:
        A dict with the metrics under "personal" and, if the method has a global model, "global"; and whether every
        client deploys the global model.
    """
    row, metrics = algorithm.global_row(), []
    all_deploy_global = True
    for cohort, rows in deployed(algorithm, engine, ids, round, final):
        metrics.append(score(cohort, rows, algorithm.predict, "test") | attack_success(cohort, rows, algorithm.predict))
        is_global = row is not None and isinstance(rows, Tensor) and torch.equal(rows, row)
        all_deploy_global = all_deploy_global and is_global
    scopes = {"personal": _concatenated(metrics)}
    if row is not None:  # shared: the metrics of one model that all clients use
        scopes["global"] = scopes["personal"] if all_deploy_global else shared(row, engine, ids, round)
    return scopes, all_deploy_global


def deployed(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool
) -> Iterator[tuple[Cohort, Any]]:
    """Yield slices of the clients as cohorts, with the rows (model parameters) that they deploy.

    Args:
        algorithm: The federated method, such as FedAvg.
        engine: The engine of the run.
        ids: The clients to evaluate [n].
        round: The round after which to evaluate, from 0.
        final: Whether it is the last round of the run.

    Yields:
        A cohort of K clients; and one row per client [K, ...], one row that all share [P], or a dict of these.
    """
    for slice_ids in slices(engine, ids):
        cohort = Cohort(engine, slice_ids, round, "evaluation")
        with torch.no_grad():
            # adds the LoRA factors that stay with the clients (adapter.sync=fedsa); else the rows are unchanged
            rows = cohort.with_personal_factors(algorithm.personalized(cohort, final))
        _require_rows(algorithm, rows, len(cohort))
        yield cohort, rows


def _concatenated(metrics: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the metrics of slices of clients, in order.

    Args:
        metrics: For each slice of k clients, {name: values [k]}.  All have the same names.

    Returns:
        {name: values [n]} of all n clients.
    """
    return {name: np.concatenate([m[name] for m in metrics]) for name in metrics[0]}


def _require_rows(algorithm: Algorithm, rows: Any, clients: int) -> None:
    """Raise RunError unless the rows are one shared row [P] or have one row per client.

    Args:
        algorithm: The method, for the message.
        rows: The result of `Algorithm.personalized`: a tensor, or a dict of tensors.
        clients: The number of clients.
    """
    for tensor in rows.values() if isinstance(rows, dict) else [rows]:
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and len(tensor) != clients:
            raise RunError(
                f"{type(algorithm).__name__}.personalized returned shape {[*tensor.shape]} for {clients} clients: "
                f"expected one shared row [P], or [{clients}, ...] with one row per client; correct this method"
            )


def shared(row: Tensor, engine: Engine, ids: np.ndarray, round: int, split: str = "test") -> dict[str, np.ndarray]:
    """Return the metrics of one model that all clients share.

    Args:
        row: Its parameters [P].
        engine: The engine of the run.
        ids: The clients to evaluate [n].
        round: The round after which to evaluate, from 0.
        split: "train", "val" or "test".

    Returns:
        Metrics by name, [n] each.
    """
    cohorts = [Cohort(engine, slice_ids, round, "evaluation") for slice_ids in slices(engine, ids)]
    # predict=None: the forward pass of the model, not the method's own prediction
    metrics = [score(cohort, row, predict=None, split=split) for cohort in cohorts]
    if split == "test":
        metrics = [m | attack_success(cohort, row, predict=None) for m, cohort in zip(metrics, cohorts)]
    return _concatenated(metrics)


def attack_success(cohort: Cohort, rows: Any, predict: Any) -> dict[str, np.ndarray]:
    """Return the fraction of each client's triggered test samples that its model assigns to the attackers' class.

    Args:
        cohort: The clients.
        rows: Their model parameters: one row per client [K, ...], one row that all share [P], or a dict of these.
        predict: The method's predict(model, rows [k, ...], inputs [k, b, ...]).  None: the forward pass of the model.

    Returns:
        The metric ATTACK_SUCCESS by name, [K]; {} if the attack has no trigger.
    """
    if TRIGGERED not in cohort.federation.splits:  # the split of the triggered test samples
        return {}
    return {ATTACK_SUCCESS: score(cohort, rows, predict, TRIGGERED)["accuracy"]}


def score(cohort: Cohort, rows: Any, predict: Any, split: str) -> dict[str, np.ndarray]:
    """Return the metrics of each client's model on its samples.

    If several processes share the run, each computes some clients, and all get the metrics of all.

    Args:
        cohort: The clients.
        rows: Their model parameters: one row per client [K, ...], one row that all share [P], or a dict of these.
        predict: The method's predict(model, rows [k, ...], inputs [k, b, ...]).  None: the forward pass of the model.
        split: "train", "val" or "test".

    Returns:
        Metrics by name, [K] each.
    """

    def score_positions(positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return {metric: values [k]} of the clients at the given positions [k], int64, of the cohort."""
        subset = Cohort(cohort.engine, cohort.ids[positions], cohort.round, cohort.mode)
        subset_rows = rows if len(subset) == len(cohort) else _rows_at(rows, positions, cohort.device)
        return _score(subset, subset_rows, predict, split)

    sizes = cohort.federation.splits[split].sizes_of(cohort.ids)
    return cohort.engine.executor.ranks.compute_distributed(work=sizes, compute=score_positions, ids=cohort.ids)


def _rows_at(rows: Any, positions: np.ndarray, device: torch.device) -> Any:
    """Return the rows at positions [k] of rows [K, ...], or of a dict of them; a shared row [P] is returned unchanged.

    Args:
        rows: The rows, on the device.
        positions: The positions, int64.
        device: The compute device.
    """
    if isinstance(rows, Tensor) and rows.dim() == 1:
        return rows
    return select_rows(rows, torch.from_numpy(positions).to(device))


def _score(cohort: Cohort, rows: Any, predict: Any, split: str) -> dict[str, np.ndarray]:
    """Compute the task's scores in this process, in groups of clients whose statistics fit in STATISTICS_BYTES.

    Args:
        cohort: The clients.
        rows: Their model parameters: one row per client [K, ...], one row that all share [P], or a dict of these.
        predict: The method's predict(model, rows [k, ...], inputs [k, b, ...]).  None: the forward pass of the model.
        split: "train", "val" or "test".

    Returns:
        A dict from metric to its values, [K] each.
    """
    sizes = cohort.federation.splits[split].sizes_of(cohort.ids)
    # statistics of a sample have about a number of 8 bytes per class, and four others
    groups = _groups(sizes, STATISTICS_BYTES // (8 * (cohort.federation.num_classes + 4)))
    metrics = []  # one entry per group
    for positions in groups:
        group, group_rows = cohort, rows
        if len(groups) > 1:
            group = Cohort(cohort.engine, cohort.ids[positions], cohort.round, cohort.mode)
            group_rows = _rows_at(rows, positions, cohort.device)
        mask = cohort.federation.class_mask
        mask = None if mask is None else mask[group.index].cpu().numpy()  # whether a client has a class  [k, C]
        offsets = np.append(0, np.cumsum(sizes[positions]))
        metrics.append(cohort.engine.task.scores(group.sample_statistics(group_rows, predict, split), offsets, mask))
    return _concatenated(metrics)


def _groups(sizes: np.ndarray, max_samples: int) -> list[np.ndarray]:
    """Group the positions of consecutive clients.

    A group has at most MAX_CLIENTS clients and max_samples samples, or a single client with more samples.

    Args:
        sizes: The number of samples of each client [K].
        max_samples: The largest number of samples of a group.

    Returns:
        The positions of each group, ascending.
    """
    before = np.append(0, np.cumsum(sizes)[:-1])  # samples of earlier clients [K]
    starts = [0]  # the position of the first client of each group
    for i in range(1, len(sizes)):
        is_full = i - starts[-1] == MAX_CLIENTS or before[i] + sizes[i] - before[starts[-1]] > max_samples
        if is_full:
            starts.append(i)
    return np.split(np.arange(len(sizes)), starts[1:])
