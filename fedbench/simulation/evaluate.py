"""What every client's model scores on its own samples: any method, all clients, in memory-bounded slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.engine.cohort import Cohort, Engine, cut
from fedbench.nn.flat import FlatModel
from fedbench.tasks import scores

SLICE_BYTES = 256 << 20          # of personalized rows held at a time


def slices(engine: Engine, ids: np.ndarray) -> list[np.ndarray]:
    """ids cut so that their rows fit in SLICE_BYTES."""
    size = max(1, SLICE_BYTES // (4 * engine.model.size))
    return [ids[a:a + size] for a in range(0, len(ids), size)]


def personal(algorithm: Algorithm, engine: Engine, ids: np.ndarray, round: int, final: bool, part: str = "test"
             ) -> dict[str, np.ndarray]:
    """Metrics of what each client would deploy, after round (from 0), on a split.  # each [len(ids)]"""
    found = []
    for some in slices(engine, ids):
        cohort = Cohort(engine, some, round, "evaluation")
        with torch.no_grad():
            rows = algorithm.personalized(cohort, final)
        found.append(score(cohort, rows, algorithm.predict, part))
    return {name: np.concatenate([f[name] for f in found]) for name in found[0]}


def shared(row: Tensor, engine: Engine, ids: np.ndarray, round: int, part: str = "test") -> dict[str, np.ndarray]:
    """Metrics of one row [P] on every client's split.  # each [len(ids)]"""
    found = [score(Cohort(engine, some, round, "evaluation"), row, None, part) for some in slices(engine, ids)]
    return {name: np.concatenate([f[name] for f in found]) for name in found[0]}


def score(cohort: Cohort, rows: Any, predict: Any, part: str) -> dict[str, np.ndarray]:
    """per_client metrics of rows on a split of the cohort's clients; every rank scores its share of them."""
    def own(positions: np.ndarray) -> dict[str, np.ndarray]:
        some = Cohort(cohort.engine, cohort.ids[positions], cohort.round, cohort.purpose)
        return _score(some, rows if len(some) == len(cohort) else _some(rows, positions, cohort.device), predict, part)
    return cohort.engine.executor.ranks.spread(cohort.federation.splits[part].sizes_of(cohort.ids), own)


def _some(rows: Any, positions: np.ndarray, device: torch.device) -> Any:
    """The rows [K, ...] at these positions; a row [P] that all clients share, as it is."""
    if isinstance(rows, Tensor) and (rows.dim() == 1 or rows.stride(0) == 0):
        return rows if rows.dim() == 1 else rows[0]
    return cut(rows, torch.from_numpy(positions).to(device))


def _score(cohort: Cohort, rows: Any, predict: Any, part: str) -> dict[str, np.ndarray]:
    ragged = cohort.federation.splits[part].select(cohort.ids)
    targets = cohort.federation.targets[torch.from_numpy(ragged.indices).to(cohort.device)]      # [n, ...]
    mask = cohort.federation.class_mask
    mask = None if mask is None else mask[cohort.index]                                          # [K, C]
    if cohort.engine.task.name == "segmentation":
        return _score_masks(cohort, rows, predict, part, ragged.offsets)
    logits = torch.cat(cohort.forward(rows, predict, part)) if len(targets) \
        else torch.zeros(0, cohort.federation.num_classes)                                       # [n, C]
    per_sample = None if mask is None else mask[torch.from_numpy(np.repeat(np.arange(len(cohort)), ragged.sizes))
                                                .to(cohort.device)]                              # [n, C]
    loss = _loss(cohort, logits, targets, per_sample)
    return scores.per_client(cohort.engine.task.name, logits.cpu().numpy(), targets.cpu().numpy(), ragged.offsets,
                              loss.cpu().numpy(), None if mask is None else mask.cpu().numpy())


def _loss(cohort: Cohort, logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """Per-sample loss, each sample as a batch of one where classes are masked.  # [n]"""
    if not len(logits):
        return logits.new_zeros(0)
    if mask is None:
        return cohort.engine.task.loss(logits, targets)
    return cohort.engine.task.loss(logits[:, None], targets[:, None], mask)[:, 0]


def _score_masks(cohort: Cohort, rows: Any, predict: Any, part: str, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """Segmentation: a client at a time, and only pixel counts leave it, never the masks' logits."""
    federation, predict = cohort.federation, predict or FlatModel.predict
    counts, losses = [(np.zeros((0, federation.num_classes), np.int64),) * 3], [np.zeros(0, np.float32)]
    for i in np.flatnonzero(np.diff(offsets)):
        one = Cohort(cohort.engine, cohort.ids[i:i + 1], cohort.round, cohort.purpose)
        logits = one.forward(cut(rows, torch.tensor([i], device=cohort.device)), predict, part)[0]   # [n_i, C, H, W]
        targets = federation.targets[torch.from_numpy(federation.splits[part][one.ids[0]]).to(cohort.device)]
        if federation.class_mask is not None:
            logits = logits.masked_fill(~federation.class_mask[one.ids[0]][:, None, None], float("-inf"))
        losses.append(cohort.engine.task.loss(logits, targets).cpu().numpy())
        counts.append(scores.segmentation_counts(logits.cpu().numpy(), targets.cpu().numpy()))
    joined = scores.SegmentationCounts(*(np.concatenate(column) for column in zip(*counts)))
    return scores.per_client("segmentation", joined, None, offsets, np.concatenate(losses))
