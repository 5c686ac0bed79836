"""What every client's model scores on its own samples: any method, all clients, in memory-bounded slices."""

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

SLICE_BYTES = 256 << 20  # of personalized rows held at a time
TALLY_BYTES = 64 << 20  # of what a task keeps of evaluated samples


def slices(engine: Engine, ids: np.ndarray) -> list[np.ndarray]:
    """ids [n] in slices whose rows fit into SLICE_BYTES."""
    size = max(1, SLICE_BYTES // (4 * engine.model.size))
    return [ids[a : a + size] for a in range(0, len(ids), size)]


def personal(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool, part: str = "test"
) -> dict[str, np.ndarray]:
    """Metrics of what each client would deploy, after round (from 0), on a split.  # each [len(ids)]"""
    found = deployed(algorithm, engine, ids, round, final)
    return _joined([score(cohort, rows, algorithm.predict, part) for cohort, rows in found])


def personal_and_global(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool
) -> tuple[dict[str, dict[str, np.ndarray]], bool]:
    """Return the test metrics after a round (from 0), and whether personal and global metrics are the same.

    "personal" metrics are of the row that each client deploys, "global" ones of the server's row, if there is one.
    They are the same if every client deploys the server's row.
    """
    row, metrics = algorithm.global_row(), []
    same = True
    for cohort, rows in deployed(algorithm, engine, ids, round, final):
        metrics.append(score(cohort, rows, algorithm.predict, "test"))
        same = same and row is not None and isinstance(rows, Tensor) and torch.equal(rows, row)
    found = {"personal": _joined(metrics)}
    if row is not None:
        found["global"] = found["personal"] if same else shared(row, engine, ids, round)
    return found, same


def deployed(
    algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool
) -> Iterator[tuple[Cohort, Any]]:
    """Yield the clients in slices, with the rows that each slice deploys."""
    for slice_ids in slices(engine, ids):
        cohort = Cohort(engine, slice_ids, round, "evaluation")
        with torch.no_grad():
            rows = algorithm.personalized(cohort, final)
        _require_rows(algorithm, rows, len(cohort))
        yield cohort, rows


def _joined(metrics: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the concatenated metrics of consecutive clients."""
    return {name: np.concatenate([m[name] for m in metrics]) for name in metrics[0]}


def _require_rows(algorithm: Algorithm, rows: Any, clients: int) -> None:
    """RunError where what clients deploy is neither one row that all share nor a row for each of them."""
    for found in rows.values() if isinstance(rows, dict) else [rows]:
        if isinstance(found, Tensor) and found.dim() > 1 and len(found) != clients:
            raise RunError(
                f"{type(algorithm).__name__}.personalized gave {[*found.shape]} for {clients} clients: it is a row [P] "
                f"that all of them share, or [{clients}, ...] with a row for each"
            )


def shared(row: Tensor, engine: Engine, ids: np.ndarray, round: int, part: str = "test") -> dict[str, np.ndarray]:
    """Metrics of one row [P] on every client's split.  # each [len(ids)]"""
    cohorts = (Cohort(engine, slice_ids, round, "evaluation") for slice_ids in slices(engine, ids))
    return _joined([score(cohort, row, None, part) for cohort in cohorts])


def score(cohort: Cohort, rows: Any, predict: Any, part: str) -> dict[str, np.ndarray]:
    """Metrics of rows on each client's split; every rank computes those of its part of the cohort.  # each [K]

    rows: [K, ...], or one row [P] that all clients share, or a dict of such.  predict: as Algorithm.predict, None for
    the model's forward pass.
    """

    def score_positions(positions: np.ndarray) -> dict[str, np.ndarray]:
        subset = Cohort(cohort.engine, cohort.ids[positions], cohort.round, cohort.mode)
        subset_rows = rows if len(subset) == len(cohort) else _rows_at(rows, positions, cohort.device)
        return _score(subset, subset_rows, predict, part)

    return cohort.engine.executor.ranks.compute_divided(
        cohort.federation.splits[part].sizes_of(cohort.ids), score_positions
    )


def _rows_at(rows: Any, positions: np.ndarray, device: torch.device) -> Any:
    """The rows [K, ...] at these positions; a row [P] that all clients share, as it is."""
    if isinstance(rows, Tensor) and rows.dim() == 1:
        return rows
    return select_rows(rows, torch.from_numpy(positions).to(device))


def _score(cohort: Cohort, rows: Any, predict: Any, part: str) -> dict[str, np.ndarray]:
    """The task's scores of these clients, of what it keeps of their samples, so many clients at a time that this stays
    below TALLY_BYTES."""
    sizes = cohort.federation.splits[part].sizes_of(cohort.ids)
    groups = _groups(sizes, TALLY_BYTES // (8 * (cohort.federation.num_classes + 4)))
    metrics = []  # of each group
    for positions in groups:
        group, group_rows = cohort, rows
        if len(groups) > 1:
            group = Cohort(cohort.engine, cohort.ids[positions], cohort.round, cohort.mode)
            group_rows = _rows_at(rows, positions, cohort.device)
        mask = cohort.federation.class_mask
        mask = None if mask is None else mask[group.index].cpu().numpy()  # [k, C]
        offsets = np.append(0, np.cumsum(sizes[positions]))
        metrics.append(cohort.engine.task.scores(group.tally(group_rows, predict, part), offsets, mask))
    return _joined(metrics)


def _groups(sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Positions of consecutive clients with at most so many samples together, or of one client with more."""
    before = np.append(0, np.cumsum(sizes)[:-1])  # [K]
    starts = [0]
    for i in range(1, len(sizes)):
        if before[i] + sizes[i] - before[starts[-1]] > most:
            starts.append(i)
    return np.split(np.arange(len(sizes)), starts[1:])
