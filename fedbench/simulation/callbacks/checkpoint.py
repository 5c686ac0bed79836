"""When a run saves its state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedbench.simulation import checkpoint
from fedbench.simulation.callbacks.base import Callback

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

SHARE = 0.05  # of the time of a run, if checkpoint.every is null


class Checkpoint(Callback):
    """Save the run and the states of the other callbacks.  It comes after them in the list.

    Args:
        every: n: every n rounds; 0: after the last round only; None: as often as takes SHARE of the time.
        others: The callbacks whose states are saved.
    """

    def __init__(self, every: int | None, others: Sequence[Callback] = ()):
        self.every, self.others = every, others
        self.seconds, self.last = 0.0, -float("inf")

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Save, if it is due."""
        if not self.is_due(run.done, run.is_last_round):
            return
        began = time.monotonic()
        self.save(run)
        self.last = time.monotonic()
        self.seconds = self.last - began

    def is_due(self, done: int, final: bool) -> bool:
        """Return whether to save after ``done`` rounds.  final: no round follows in this process."""
        if final or self.every:
            return final or done % (self.every or 1) == 0
        return self.every is None and time.monotonic() - self.last > self.seconds / SHARE

    def save(self, run: Simulation) -> None:
        """Write the checkpoint, after the callbacks have written what it refers to."""
        states = {callback.name: callback.on_checkpoint(run) for callback in self.others}
        kept = {name: state for name, state in states.items() if state is not None}
        checkpoint.save(run.run_dir, {**run.state(), **kept}, run.is_sound)
        run.is_sound = True
