"""Stop a run after its current round when a signal arrives, in all processes of the run together."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import Any

from fedbench.core import signals
from fedbench.engine import ranks as processes

log = logging.getLogger(__name__)


class StopSignals:
    """Context manager that records stop signals (core/signals.py), for a stop after the current round.

    A second signal raises KeyboardInterrupt at once, unless the first was a scheduler's advance warning.

    Attributes:
        received: Whether this process received a signal.
    """

    def __enter__(self) -> StopSignals:
        self.received, self._next_interrupts, self._handlers = False, False, ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(signals.handled(self._receive))
        return self

    def requested(self) -> bool:
        """Return whether any process of the run received a stop signal.

        All processes must call this function at the same time, because they exchange messages.
        """
        return bool(processes.current().synchronize("end of a round", int(self.received)))

    def raise_if_requested(self) -> None:
        """Raise KeyboardInterrupt if any process of the run received a stop signal.  All processes must call it."""
        if self.requested():
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: Any) -> None:
        """Record the first signal, and raise KeyboardInterrupt for a second one; frame: the stack frame, unused.

        After a scheduler's advance warning (`signals.is_warning`), the next signal counts as the first.
        """
        if self._next_interrupts:  # a signal before this one already requested the stop
            raise KeyboardInterrupt
        self.received, self._next_interrupts = True, not signals.is_warning(number)
        if processes.current().is_first:
            log.warning("stopping after this round, which will be saved; signal again to stop at once")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._handlers.__exit__(kind, error, trace)  # passes KeyboardInterrupt to the outer handlers
