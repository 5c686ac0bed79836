"""measured.npz: what a method measures of each client after the last round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedbench.algorithms.base import Algorithm
from fedbench.data._files import write_npz
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.simulation import evaluate

FILE = "measured.npz"


def write_measured(run_dir: Path, algorithm: Algorithm, engine: Engine, ids: np.ndarray) -> None:
    """Measure clients in all processes, and write `client` [K] and each name [K, ...] float32 in the first.

    Nothing is written if the method measures nothing.
    """
    slices = evaluate.slices(engine, ids)
    cohorts = [Cohort(engine, slice_ids, engine.rounds - 1, "evaluation") for slice_ids in slices]
    with torch.no_grad():
        measured = [algorithm.measured(cohort) for cohort in cohorts]
    if measured[0] and engine.executor.ranks.first:
        whole = {name: np.concatenate([m[name].float().cpu().numpy() for m in measured]) for name in measured[0]}
        write_npz(run_dir / FILE, client=ids, **whole)
