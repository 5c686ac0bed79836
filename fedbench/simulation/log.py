"""Where a run's log lines go: its run.log, the terminal, and nowhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

FILE = "run.log"
# What a run prints: log lines and progress; a bar, on a terminal, that vanishes; warnings only.
Output = Literal["lines", "bar", "warnings"]


class Console(logging.StreamHandler):
    """Log handler that writes to the current sys.stdout, so that a progress bar can move aside."""

    def __init__(self, stream: Any = None) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The current standard output."""
        return sys.stdout


class LogFile(logging.FileHandler):
    """Log file that a run can do without: on a full disk the lines are dropped and nothing is printed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if the disk takes it."""
        with suppress(OSError):  # of opening it, which logging.FileHandler leaves until the first line
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback between the run's lines."""

    def close(self) -> None:
        """Close the file; a full disk is no error."""
        with suppress(OSError):
            super().close()


@contextmanager
def logged(folder: Path, output: Output = "lines") -> Iterator[None]:
    """Write the package's log into the run folder, and print it (output="lines") or its warnings.

    The loggers are afterwards as they were before.
    """
    logger = logging.getLogger("fedbench")
    console, file = Console(), LogFile(folder / FILE, delay=True, encoding="utf-8")
    console.setLevel(logging.INFO if output == "lines" else logging.WARNING)
    before, propagates = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # to handlers of the calling program, which would print each line once more
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
    """Print one line for the user on standard error."""
    print(f"fedbench: {sentence}", file=sys.stderr, flush=True)
