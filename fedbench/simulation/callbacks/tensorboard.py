"""Write TensorBoard event files in the run folder.  View them with ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedbench.simulation.callbacks.base import Callback, Status

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation


class TensorBoard(Callback):
    """Write the scores and costs of each round as scalars (torch.utils.tensorboard).

    Args:
        folder: The folder of the event files, relative to the run folder.
        histograms: Whether to write histograms of the clients' scores.
    """

    packages: ClassVar = {"tensorboard": "tensorboard"}

    def __init__(self, folder: str = "tensorboard", histograms: bool = False):
        self.folder, self.histograms = folder, histograms

    def on_start(self, run: Simulation, saved: None) -> None:
        """Open an event file; TensorBoard hides rounds that a resumed run repeats.  ``saved`` is not used."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.run_dir / self.folder), purge_step=run.done + 1 if run.done else None)

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Write the scores of round ``run.done`` as scalars, and with histograms=True also those of the clients."""
        self._write(run.done, metrics)
        if self.histograms:
            for name, values in clients.items():
                # scores have names such as "personal/accuracy"; other columns are ids and numbers of samples
                if "/" in name and np.isfinite(values).any():
                    self._writer.add_histogram(f"clients/{name}", values[np.isfinite(values)], run.done)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Write the costs of round ``run.done`` as scalars, under the names cost/NAME, except those that are None."""
        self._write(run.done, {f"cost/{name}": value for name, value in costs.items() if value is not None})

    def _write(self, round: int, values: Mapping[str, float]) -> None:
        """Write values, {name: value}, as scalars of a round (from 1)."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def on_checkpoint(self, run: Simulation) -> None:
        """Flush the events to the disk."""
        self._writer.flush()

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Close the event file.  The status changes nothing, and the summary is not written."""
        self._writer.close()
