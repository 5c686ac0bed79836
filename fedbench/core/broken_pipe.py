"""Standard output and error streams that stay usable after their reader closed, as in ``... | head``."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

DISCONNECTED = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader, the terminal or the descriptor is gone


class _Descriptor(io.FileIO):
    """A descriptor that discards output once its reader is gone."""

    def write(self, data: Any) -> int:
        """Write bytes, and return their number.

        When the reader of the stream is gone, the file descriptor is redirected to /dev/null for this and later output.
        """
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in DISCONNECTED:  # codes that say that nobody reads the stream
                raise
            _redirect_to_devnull(self.fileno())
            return len(data)


@contextmanager
def survive_broken_pipe() -> Iterator[None]:
    """Discard the block's output once its reader has closed, instead of raising BrokenPipeError.

    sys.stdout and sys.stderr are restored after the block.  Streams into a file keep raising errors, such as that of a
    full disk.  Streams of notebooks and tests are not replaced either.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _wrapped(sys.stdout, 1), _wrapped(sys.stderr, 2)  # 1, 2: their file descriptors
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # a closed stream
                stream.flush()
        sys.stdout, sys.stderr = before


def _wrapped(stream: Any, fd: int) -> TextIO:
    """Return a stream that discards its output once its reader is gone.

    Args:
        stream: sys.stdout or sys.stderr.  None: the process was started without it.
        fd: The number of its descriptor: 1 or 2.

    Returns:
        A wrapper of the stream; the stream itself if it writes to a file, or not to this descriptor.
    """
    if stream is None:  # a closed descriptor, whose number the next opened file would get
        try:
            os.fstat(fd)
        except OSError:
            _redirect_to_devnull(fd)
        return open(os.devnull, "w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper or stream.fileno() != fd or stat.S_ISREG(os.fstat(fd).st_mode):
        return stream
    with suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(_Descriptor(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)


def _redirect_to_devnull(fd: int) -> None:
    """Redirect a file descriptor, such as 1 for standard output, to /dev/null.  A closed one is opened there."""
    devnull = os.open(os.devnull, os.O_RDWR)
    if devnull != fd:  # os.open returns fd itself if fd is closed and is the lowest free number
        os.dup2(devnull, fd)
        os.close(devnull)
