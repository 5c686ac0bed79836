"""The log of a run: handlers for run.log and for the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

FILE = "run.log"
# What a run prints.  lines: log lines and progress; bar: a progress bar that disappears; warnings: only warnings.
Output = Literal["lines", "bar", "warnings"]


class Console(logging.StreamHandler):
    """Log handler that writes to the current sys.stdout, which a progress bar may replace."""

    def __init__(self, stream: Any = None) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The current standard output."""
        return sys.stdout


class LogFile(logging.FileHandler):
    """Log file that ignores write errors: if the disk is full, lines are dropped silently."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a log record; drop it if it cannot be written, because the disk is full for example."""
        with suppress(OSError):  # with delay=True the first line opens the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing after a line could not be written.  The base class would print a traceback."""

    def close(self) -> None:
        """Close the file, and ignore write errors, because the disk may be full."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged(folder: Path, output: Output = "lines") -> Iterator[None]:
    """Log the block to run.log in the folder and to the terminal, and restore the logger afterwards.

    Args:
        folder: The run folder.
        output: "lines" prints all lines of level INFO, the other values only warnings.
    """
    logger = logging.getLogger("fedbench")
    console, file = Console(), LogFile(folder / FILE, delay=True, encoding="utf-8")
    console.setLevel(logging.INFO if output == "lines" else logging.WARNING)
    before, propagates = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # otherwise handlers of the calling program would print each line again
    logger.handlers += [console, file]
    try:
        yield
    finally:
        for handler in (console, file):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before)
        logger.propagate = propagates


def notice(sentence: str) -> None:
    """Print "fedbench: <sentence>" for the user on standard error."""
    print(f"fedbench: {sentence}", file=sys.stderr, flush=True)
