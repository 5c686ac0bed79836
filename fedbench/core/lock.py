"""One writer for each run folder: whoever writes into it holds its lock, and a second process gets one sentence.

The system drops the lock with the process that holds it, however that ends.  The file says which process has it: its
id, and its host.  Where a file system has no locks, a file that is there while its process lives stands in for one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from fedbench.core.options import ConfigError, RunError

log = logging.getLogger(__name__)
NAME, MARK = ".lock", ".lock.mark"  # MARK: where the file system has no locks
SECONDS = 1.0  # for finding that the process of a mark is dead, and taking its place


class Busy(RunError):
    """Another process writes into the folder."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the folder while the block runs; Busy, at once, where another process does."""
    if not os.access(folder, os.W_OK):  # nobody writes there
        yield
        return
    try:
        lock = _acquire(folder)
    except Timeout as error:
        raise Busy(f"{folder} is being written by {holder(folder)}: one process at a time") from error
    except OSError as error:
        raise ConfigError(f"{folder / NAME} cannot be locked ({error.strerror or error})") from error
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Whether some process holds the folder."""
    try:
        with writing(folder):
            return False
    except Busy:
        return True


def holder(folder: Path) -> str:
    """Who holds the folder, in words."""
    with suppress(OSError, ValueError):
        path = next(p for p in (folder / MARK, folder / NAME) if p.exists() and p.stat().st_size)
        number, host = path.read_text(encoding="utf-8").splitlines()[:2]
        return f"process {int(number)} on {host}"
    return "another process"


def _acquire(folder: Path) -> BaseFileLock:
    path = folder / NAME
    try:
        lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise
    except PermissionError:
        raise
    except (OSError, NotImplementedError) as error:
        path.unlink(missing_ok=True)
        lock = SoftFileLock(folder / MARK, timeout=SECONDS, thread_local=False)
        lock.acquire(poll_interval=SECONDS / 10)
        log.warning(
            "%s: this file system has no locks (%s); the file %s keeps other processes out while this one lives",
            folder,
            getattr(error, "strerror", None) or error,
            MARK,
        )
    if not isinstance(lock, SoftFileLock):  # which has written this by itself
        path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    return lock
