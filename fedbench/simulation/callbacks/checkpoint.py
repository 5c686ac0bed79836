"""Callback that saves checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedbench.simulation import checkpoint
from fedbench.simulation.callbacks.base import Callback

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

SHARE = 0.05  # largest fraction of the run time spent on saving, if checkpoint.every is null


class Checkpoint(Callback):
    """Save the run and the states of the other callbacks, which are called before this one.

    Args:
        every: Rounds between checkpoints.  0: only after the last round.  None: as often as possible within SHARE of
            the run time.
        others: The callbacks whose states are saved.

    Attributes:
        seconds: The time that the last checkpoint took.
        last: The time at which it was written (time.monotonic), in seconds; -inf before the first.
    """

    def __init__(self, every: int | None, others: Sequence[Callback] = ()):
        self.every, self.others = every, others
        self.seconds, self.last = 0.0, -float("inf")

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Save a checkpoint if `is_due` says so for round ``run.done``, and measure the seconds that this takes.

        The argument `costs` is not used.
        """
        is_due = self.is_due(run.done, run.is_last_round)
        if run.engine.rows.is_sharded:  # then all processes take part
            is_due = run.engine.executor.ranks.broadcast_object("whether a checkpoint is due", is_due)
        if not is_due:
            return
        began = time.monotonic()
        self.save(run)
        self.last = time.monotonic()  # end of the last checkpoint
        self.seconds = self.last - began  # how long it took

    def is_due(self, done: int, final: bool) -> bool:
        """Return whether a checkpoint is due.

        Args:
            done: The number of finished rounds.
            final: Whether it was the last round of this process.
        """
        if final:
            return True
        if self.every is not None:
            return self.every > 0 and done % self.every == 0  # 0: only after the last round
        # every=None: the last checkpoint took self.seconds; this must be at most SHARE of the time since then
        return time.monotonic() - self.last > self.seconds / SHARE

    def save(self, run: Simulation) -> None:
        """Write a checkpoint of the run, with the states of the other callbacks by their names.

        If processes divide the rows of clients, all processes must call this together.  Rank 0 writes.
        """
        content = run.state()
        if not run.engine.executor.ranks.is_first:
            return
        states = {callback.name: callback.on_checkpoint(run) for callback in self.others}
        states = {name: state for name, state in states.items() if state is not None}
        # is_sound: whether the existing checkpoint is intact, so that it is kept as the previous one
        checkpoint.save(run.run_dir, {**content, **states}, run.is_sound)
        run.is_sound = True
