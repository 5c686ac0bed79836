"""Standard output and error that never end a command: ``... | head`` and ``... >&-``."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LOST = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader, the terminal or the descriptor is gone


class _Lasting(io.FileIO):
    """A descriptor that is written to until nobody reads on; what follows goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            _lead_nowhere(self.fileno())
            return len(data)


@contextmanager
def lasting() -> Iterator[None]:
    """Let commands of this block run to their end where nobody reads what they print: the rest is dropped.

    sys.stdout and sys.stderr are after the block what they were before.  Streams that are no descriptor of the process
    (a notebook's, a test's) and files are left alone: a full disk is an error.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # it was closed
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: Any, fd: int) -> TextIO:
    if stream is None:  # the descriptor is closed, and the next file that is opened would get its number
        try:
            os.fstat(fd)
        except OSError:
            _lead_nowhere(fd)
        return open(os.devnull, "w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper or stream.fileno() != fd or stat.S_ISREG(os.fstat(fd).st_mode):
        return stream
    with suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(_Lasting(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)


def _lead_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
