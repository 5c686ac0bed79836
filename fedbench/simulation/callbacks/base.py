"""The base class of callbacks.  A callback overrides the hooks that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

Status = Literal["finished", "paused", "failed", "interrupted"]


class Callback:
    """Base class of callbacks, whose hooks are called during a run.  Hooks do nothing by default.

    Each hook receives the run: its configuration (``cfg``), folder (``run_dir``), number of finished rounds
    (``done``), last metrics (``last``) and method (``algorithm``).  A callback must not change the run.  If several
    processes share a run, only rank 0 calls callbacks.  With hardware.rows=sharded, they cannot read states of clients.

    Attributes:
        name: The key of the callback's state in the checkpoint.
        packages: The optional packages that the callback imports, as a dict from module to name for pip.  They must be
            installed before the run begins.
    """

    name = ""
    packages: ClassVar[Mapping[str, str]] = {}

    def on_start(self, run: Simulation, saved: Any) -> None:
        """Prepare, before the first round of this process.

        Args:
            run: The run, with its configuration, folder, method, engine, and the number of finished rounds (``done``).
            saved: The state that ``on_checkpoint`` returned, if the run resumes from a checkpoint; else None.
        """

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Process the scores of round ``run.done``.  Called after each evaluation.

        Args:
            run: The run, with its configuration, folder, method, engine, and the number of finished rounds (``done``).
            metrics: Scores over clients by name, as in metrics.csv.
            clients: The columns of clients.csv by name: ``client`` and the scores, [n] each.
        """

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Process the costs of round ``run.done``.  Called after each round and its evaluation.

        Args:
            run: The run, with its configuration, folder, method, engine, and the number of finished rounds (``done``).
            costs: Costs by name, as in costs.csv: seconds, steps, samples, bytes.
        """

    def on_checkpoint(self, run: Simulation) -> Any:
        """Return the callback's state for a checkpoint: numbers, text, lists and dicts of them; None for no state."""

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Clean up.  Called at the end of a run, also if it failed or was interrupted.

        Args:
            run: The run, with its configuration, folder, method, engine, and the number of finished rounds (``done``).
            status: finished, paused (checkpoint.pause_after), failed or interrupted.
            summary: The content of summary.json.
        """
