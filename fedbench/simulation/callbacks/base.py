"""The hooks of a run.  A callback overrides those that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

Status = Literal["finished", "failed", "interrupted"]


class Callback:
    """Watch a run.  Every hook does nothing by default.

    If several processes share a run, only the first one calls callbacks.  ``run`` has the configuration (``cfg``), the
    run folder (``run_dir``), the number of finished rounds (``done``), the last metrics (``last``) and the method
    (``algorithm``).  A callback must not change it.

    Attributes:
        name: The key of the callback's state in the checkpoint.
        packages: Optional packages that the callback imports, and the names by which pip installs them.  Without them
            a run is refused before it begins.
    """

    name = ""
    packages: ClassVar[Mapping[str, str]] = {}

    def on_start(self, run: Simulation, saved: Any) -> None:
        """Prepare, before the first round of this process.

        Args:
            run: The run.
            saved: The result of ``on_checkpoint`` in the checkpoint from which the run resumes, else None.
        """

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Use the scores of round ``run.done``, if it was evaluated.

        Args:
            run: The run.
            metrics: Scores over clients by name, as in metrics.csv.
            clients: Columns of clients.csv: ``client`` and the scores by name.  # [n] each
        """

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Use the costs of round ``run.done``, after its evaluation.

        Args:
            run: The run.
            costs: Columns of costs.csv: seconds, steps, samples, bytes.
        """

    def on_checkpoint(self, run: Simulation) -> Any:
        """Return the state for the checkpoint that is written next: numbers, text, lists and dicts of them."""

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Finish, also after a failure and if the run is to be resumed.

        Args:
            run: The run.
            status: finished, failed or interrupted.
            summary: The content of summary.json.
        """
