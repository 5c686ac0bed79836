"""What methods record for figures: small matrices between clients, recorded over the rounds, in matrices.npz of the run
directory; what is measured of each client once, after the last round, in measured.npz.

Matrices are APPLE's directed relationships, PGFed's A; other small tensors are recorded with them, such as how far
pFedNet's clients are apart.  Of as many evaluated rounds as fit into BUDGET, at even distances,
the initial values and the last round always among them; nothing for federations in which two would not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fedbench.algorithms.base import Algorithm
from fedbench.core.digests import digest
from fedbench.core.options import require
from fedbench.data._files import read_npz, write_npz
from fedbench.engine.cohort import Cohort, Engine
from fedbench.simulation import evaluate

FILE, MEASURED = "matrices.npz", "measured.npz"
BUDGET = 16 << 20  # bytes of one name


class MatrixLog:
    """Records a method's matrices; rounds: of the run; every: rounds between evaluations.

    The file holds `rounds` [R] int64 and each of them under its name, [R, ...] float32.
    """

    def __init__(self, run_dir: Path, algorithm: Algorithm, num_clients: int, rounds: int, every: int):
        self.path, self.algorithm, self.last = run_dir / FILE, algorithm, rounds
        most = BUDGET // (4 * num_clients**2)  # matrices of [N, N]
        self.step = every * -(-rounds // (every * max(most - 2, 1)))
        self.active = most >= 2 and bool(algorithm.matrices())
        self.rounds: list[int] = []
        self.recorded: list[dict[str, np.ndarray]] = []
        self.digests: dict[str, str] = {}  # of what was recorded of each round

    def note(self, round: int) -> None:
        """Take the matrices as they are after a round (0: before the first), if it is one to be recorded."""
        if self.active and self._is_recorded(round):
            self._record(round, {name: m.float().cpu().numpy() for name, m in self.algorithm.matrices().items()})

    def _record(self, round: int, matrices: dict[str, np.ndarray]) -> None:
        self.rounds.append(round)
        self.recorded.append(matrices)
        self.digests[str(round)] = digest(matrices)

    def save(self) -> None:
        """Replace the file, beside a checkpoint, so that a resumed run has all up to where it goes on."""
        if self.active:
            stacked = {name: np.stack([r[name] for r in self.recorded]) for name in self.recorded[0]}
            write_npz(self.path, rounds=np.array(self.rounds, np.int64), **stacked)

    def load(self, done: int, digests: Mapping[str, str] | None = None) -> None:
        """Read what an earlier part of the run recorded, up to the round it goes on from; ConfigError where that is not
        what the digests, round -> digest, say."""
        if self.active and self.path.is_file():
            stored = read_npz(self.path)
            for r, round in enumerate(stored.pop("rounds").tolist()):
                if round <= done and self._is_recorded(round):
                    self._record(round, {name: np.asarray(values[r]) for name, values in stored.items()})  # [] too
        if self.active and digests is not None:
            expected = {round: text for round, text in digests.items() if self._is_recorded(int(round))}
            require(
                self.digests == expected,
                f"{self.path} is not what the run wrote up to round {done}, and what it held is nowhere else",
            )

    def _is_recorded(self, round: int) -> bool:
        return round % self.step == 0 or round == self.last


def write_measured(run_dir: Path, algorithm: Algorithm, engine: Engine, ids: np.ndarray) -> None:
    """Write (the first process does) what the method measures of these clients after the last round, if anything:
    `client` [K] and each name [K, ...] float32."""
    slices = evaluate.slices(engine, ids)
    cohorts = [Cohort(engine, slice_ids, engine.rounds - 1, "evaluation") for slice_ids in slices]
    with torch.no_grad():
        measured = [algorithm.measured(cohort) for cohort in cohorts]
    if measured[0] and engine.executor.ranks.first:
        whole = {name: np.concatenate([m[name].float().cpu().numpy() for m in measured]) for name in measured[0]}
        write_npz(run_dir / MEASURED, client=ids, **whole)
