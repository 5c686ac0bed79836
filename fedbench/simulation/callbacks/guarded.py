"""Wrapper that keeps the errors of a callback from ending a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.core.error_text import describe_error
from fedbench.simulation.callbacks.base import Callback, Status

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

log = logging.getLogger(__name__)


class Guarded(Callback):
    """Call the hooks of a callback until one raises an exception, then warn and disable it.

    An exception of ``on_start`` is raised, because no round is lost by then.  The state is stored as JSON, so that
    reading a checkpoint runs no code.

    Args:
        key: The key of the callback in the group, as in ``callbacks.mine``.
        callback: The callback.
    """

    def __init__(self, key: str, callback: Callback):
        self.name, self.callback, self.failed = key, callback, True  # disabled until on_start succeeds

    def on_start(self, run: Simulation, saved: str | None) -> None:
        """Call ``on_start`` of the wrapped callback with its state.

        Args:
            run: The run.
            saved: The state as JSON, if the run resumes; None for a new run, or if the callback had no state.
        """
        self.callback.on_start(run, None if saved is None else json.loads(saved))
        self.failed = False

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Call ``on_evaluation`` of the wrapped callback with these arguments, unless a hook failed before."""
        self._call("on_evaluation", run, metrics, clients)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Call ``on_round_end`` of the wrapped callback with these arguments, unless a hook failed before."""
        self._call("on_round_end", run, costs)

    def on_checkpoint(self, run: Simulation) -> str | None:
        """Return the state of the wrapped callback as JSON; None if it has no state, or if a hook failed."""
        return self._call("on_checkpoint", run)

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Call ``on_end`` of the wrapped callback with these arguments, unless a hook failed before."""
        self._call("on_end", run, status, summary)

    def _call(self, hook: str, *args: Any) -> str | None:
        """Call a hook, unless an earlier one failed.

        Args:
            hook: The name of the hook.
            *args: Its arguments.

        Returns:
            Its result as JSON; None if it returns nothing or fails.
        """
        if self.failed:
            return None
        try:
            result = getattr(self.callback, hook)(*args)
            return None if result is None else json.dumps(result)
        except Exception as error:  # of any kind
            self.failed = True
            log.warning("%s failed in %s (%s); the run continues without it", self.name, hook, describe_error(error))
            log.debug("%s failed", self.name, exc_info=True)  # into run.log only
            return None
