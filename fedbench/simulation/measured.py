"""measured.npz: a method's measurements of each client after the last round."""

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
    """Write `Algorithm.measured` of each client to measured.npz, unless the method measures nothing.

    The file contains `client` [K] and each measurement [K, ...] float32.  All processes measure, and rank 0 writes.

    Args:
        run_dir: The run folder.
        algorithm: The federated method, such as FedAvg.
        engine: The engine of the run.
        ids: The clients to measure [K].
    """
    slices = evaluate.slices(engine, ids)  # so that the models of a slice fit in memory
    # engine.rounds - 1: the last round
    cohorts = [Cohort(engine, slice_ids, engine.rounds - 1, "evaluation") for slice_ids in slices]
    with torch.no_grad():
        measured = [algorithm.measured(cohort) for cohort in cohorts]
    if measured[0] and engine.executor.ranks.is_first:
        arrays = {name: np.concatenate([m[name].float().cpu().numpy() for m in measured]) for name in measured[0]}
        write_npz(run_dir / FILE, client=ids, **arrays)
