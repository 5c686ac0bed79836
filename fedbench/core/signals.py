"""Handle signals that stop a run: Ctrl-C, signals of schedulers and launchers, and SIGHUP of a closed terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")  # announce a time limit; may be repeated, and SIGTERM may follow
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", *WARNINGS)  # Windows has only the first two
MAY_BE_IGNORED = ("SIGHUP", "SIGQUIT", *WARNINGS)
Handler = Callable[[int, Any], Any]


class _Answer:
    """A signal handler that records the last signal received, in `received` (0: none), and calls the user's handler."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.received = handler, 0
        self.terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def __call__(self, number: int, frame: Any) -> None:
        if self.received and is_warning(number):
            return  # a repeated warning, or one after another signal
        self.received = number
        _detach_closed(self.terminals)
        self.handler(number, frame)


@contextmanager
def handled(handler: Handler, names: Iterable[str] = STOP_SIGNALS) -> Iterator[None]:
    """Call a handler for stop signals during the block, which must run in the main thread.

    If the block ends by KeyboardInterrupt, the signal is then passed to the previous handler, such as a launcher's.  An
    exception of that handler (SystemExit, for a restart) replaces KeyboardInterrupt.  SIGHUP, SIGQUIT and WARNINGS stay
    ignored if they were ignored (nohup).  WARNINGS, which schedulers send before a time limit
    (SIGUSR1, SIGUSR2 and SIGXCPU), are ignored after any signal.

    Args:
        handler: The signal handler.
        names: The names of the signals.
    """
    answer = _Answer(handler)  # calls the handler, and records the last signal in `received`
    before: dict[int, Any] = {}
    for name in names:
        number = getattr(signal, name, None)
        previous = signal.getsignal(number) if number is not None else None
        if number is None or previous is None:  # absent on this system, or a handler in C, which cannot be restored
            continue
        if previous is not signal.SIG_IGN or name not in MAY_BE_IGNORED:
            before[number] = signal.signal(number, answer)
    try:
        yield
    except KeyboardInterrupt:
        _restore(before)
        _pass_on(answer.received, before.get(answer.received))
        raise
    finally:
        _restore(before)


def is_warning(number: int) -> bool:
    """Return whether the signal with this number is in WARNINGS: schedulers send these before they end a process."""
    return number in [getattr(signal, name, None) for name in WARNINGS]


def _restore(handlers: dict[int, Any]) -> None:
    """Install handlers again, given as {signal number: handler}."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _pass_on(number: int, previous: Any) -> None:
    """Pass a signal to the previous handler: an outer `handled` block records it, any other handler is called.

    Args:
        number: The signal.
        previous: The previous handler.  Python's own handler of Ctrl-C is not called, because KeyboardInterrupt is
            already being raised.
    """
    if isinstance(previous, _Answer):  # the handler of an outer block
        previous.received = number
    elif callable(previous) and previous is not signal.default_int_handler:
        previous(number, None)  # None: no stack frame


def _detach_closed(terminals: list[int]) -> None:
    """Redirect file descriptors to /dev/null if their terminal was closed, because printing to it raises an error.

    Args:
        terminals: File descriptors that were terminals when the block began.
    """
    for fd in terminals:
        if not os.isatty(fd):
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, fd)
            os.close(devnull)
