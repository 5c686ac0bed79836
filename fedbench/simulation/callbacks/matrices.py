"""matrices.npz: client-by-client matrices of a method over the rounds, recorded for figures.

Examples are APPLE's directed relationships, PGFed's A, and pFedNet's distances between clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbench.algorithms.base import Algorithm
from fedbench.core.digests import digest
from fedbench.core.options import require
from fedbench.data._files import read_npz, write_npz
from fedbench.simulation.callbacks.base import Callback

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

FILE = "matrices.npz"
BUDGET = 16 << 20  # bytes per matrix name, over all rounds


class Matrices(Callback):
    """Record the matrices of a method (`Algorithm.matrices`) in matrices.npz.

    The file contains `rounds` [R] int64, and each matrix by name, [R, ...] float32.
    """

    name = "matrices"

    def __init__(self) -> None:
        self.matrix_log: MatrixLog | None = None

    def on_start(self, run: Simulation, saved: str | None) -> None:
        """Record the method's initial client-by-client matrices, or read those of a resumed run from matrices.npz.

        Args:
            run: The run.
            saved: The digests in the checkpoint as JSON, with which the file is compared; None for a new run.
        """
        cfg = run.cfg
        self.matrix_log = MatrixLog(
            run.run_dir, run.algorithm, run.engine.federation.num_clients, cfg.rounds, cfg.eval.every
        )
        if run.done:
            self.matrix_log.load(run.done, None if saved is None else json.loads(saved))
        else:
            self.matrix_log.note(0)

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Record the method's client-by-client matrices [N, N] if round ``run.done`` is one of those to record.

        The scores `metrics` and `clients` are not used.
        """
        if self.matrix_log is not None:
            self.matrix_log.note(run.done)

    def on_checkpoint(self, run: Simulation) -> str:
        """Write matrices.npz, and return its digests as JSON: {round: digest of that round's matrices}.

        Before `on_start`, nothing is written, and the result is "{}".
        """
        if self.matrix_log is None:
            return "{}"
        self.matrix_log.save()
        return json.dumps(self.matrix_log.digests)


class MatrixLog:
    """The matrices of as many evaluated rounds as fit in BUDGET, at equal intervals.

    The initial values and the last round are always included.  Nothing is recorded if two rounds do not fit.

    Args:
        run_dir: The run folder.
        algorithm: The federated method, such as FedAvg.
        num_clients: N.
        rounds: The number of rounds of the run.
        every: The number of rounds between evaluations.
    """

    def __init__(self, run_dir: Path, algorithm: Algorithm, num_clients: int, rounds: int, every: int):
        self.path, self.algorithm, self.last = run_dir / FILE, algorithm, rounds
        max_matrices = BUDGET // (4 * num_clients**2)  # [N, N] float32
        # rounds between recorded ones: a multiple of `every`, such that all fit with the initial and the last round
        self.step = every * -(-rounds // (every * max(max_matrices - 2, 1)))
        self.active = max_matrices >= 2 and bool(algorithm.matrices())
        self.rounds: list[int] = []
        self.recorded: list[dict[str, np.ndarray]] = []
        self.digests: dict[str, str] = {}  # by round

    def note(self, round: int) -> None:
        """Record the method's current matrices, unless this round is to be omitted.

        Args:
            round: The number of finished rounds; 0 for the initial matrices.
        """
        if self.active and self._is_recorded(round):  # active: there are matrices, and two rounds fit in BUDGET
            self._record(round, {name: m.float().cpu().numpy() for name, m in self.algorithm.matrices().items()})

    def _record(self, round: int, matrices: dict[str, np.ndarray]) -> None:
        """Append the matrices of a round, {name: [N, N]}, and their digest to the records in memory."""
        self.rounds.append(round)
        self.recorded.append(matrices)
        self.digests[str(round)] = digest(matrices)

    def save(self) -> None:
        """Write all matrices that were recorded so far to matrices.npz, replacing the file.

        Do nothing if the method has no matrices, or if they do not fit in BUDGET (`active`).
        """
        if self.active:
            stacked = {name: np.stack([r[name] for r in self.recorded]) for name in self.recorded[0]}
            write_npz(self.path, rounds=np.array(self.rounds, np.int64), **stacked)

    def load(self, done: int, digests: Mapping[str, str] | None = None) -> None:
        """Read the recorded matrices up to the round of the checkpoint.  Without room for any (`active`), do nothing.

        Args:
            done: The round of the checkpoint.
            digests: The digest of each recorded round.  None: the checkpoint is of an older version without digests.

        Raises:
            ConfigError: The content of the file does not match the digests.
        """
        if self.active and self.path.is_file():
            stored = read_npz(self.path)
            for position, round in enumerate(stored.pop("rounds").tolist()):  # of the arrays' first axis
                if round <= done and self._is_recorded(round):
                    # _record also computes the digest of the round; np.asarray: an entry may be a single number
                    self._record(round, {name: np.asarray(values[position]) for name, values in stored.items()})
        if self.active and digests is not None:
            expected = {round: text for round, text in digests.items() if self._is_recorded(int(round))}
            require(
                self.digests == expected,
                f"{self.path} was changed or damaged after round {done}, so the run cannot be resumed: restore it "
                "from a backup, or start a new run",
            )

    def _is_recorded(self, round: int) -> bool:
        """Return whether the matrices after this round are to be recorded: every `step` rounds, and after the last."""
        return round % self.step == 0 or round == self.last
