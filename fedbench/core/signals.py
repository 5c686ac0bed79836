"""The signals that ask a run to stop: Ctrl-C, a scheduler's SIGTERM, a closed terminal's SIGHUP, SIGQUIT."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # Windows lacks the last two
MAY_BE_IGNORED = ("SIGHUP", "SIGQUIT")


@contextmanager
def handled(handler: Callable[[int, Any], None], names: Iterable[str] = STOPPING) -> Iterator[None]:
    """These signals call the handler while the block runs, which must be in the main thread.

    SIGHUP and SIGQUIT stay ignored where they are (nohup).
    """
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def answer(number: int, frame: Any) -> None:
        _detach_lost(terminals)
        handler(number, frame)

    before = {}
    for name in names:
        number = getattr(signal, name, None)
        ignored = number is not None and signal.getsignal(number) is signal.SIG_IGN
        if number is not None and not (ignored and name in MAY_BE_IGNORED):
            before[number] = signal.signal(number, answer)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _detach_lost(terminals: list[int]) -> None:
    """Write to nowhere instead of to a terminal that is gone: whoever prints there fails, and the run with it."""
    for fd in terminals:
        if not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, fd)
            os.close(nowhere)
