"""Lock a run folder, so that only one process at a time writes into it.

The system releases the lock when its process ends, even if it is killed.  The lock file contains the id and host of the
process.  On a file system without locks, the existence of a file (LOCK_MARK) replaces the lock.
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
LOCK_FILE = ".lock"  # the file that the system locks
LOCK_MARK = ".lock.mark"  # the file whose existence replaces the lock on file systems without locks
SECONDS = 1.0  # time to detect that the process of a LOCK_MARK has died


class Busy(RunError):
    """Another process writes into the folder."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Lock a run folder for the block.

    Args:
        folder: The run folder.

    Raises:
        Busy: Another process has locked the folder.
        ConfigError: The folder cannot be locked.
    """
    if not os.access(folder, os.W_OK):  # read-only: no process writes there
        yield
        return
    try:
        lock = _acquire(folder)
    except Timeout as error:
        raise Busy(
            f"{folder} is in use by {holder(folder)}; only one process at a time can write into it: wait until that "
            "process has ended, or use another folder"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{folder / LOCK_FILE} cannot be locked ({error.strerror or error}): use a folder that you may write into"
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Return whether any process, including this one, has locked a run folder."""
    try:
        with writing(folder):
            return False
    except Busy:
        return True


def holder(folder: Path) -> str:
    """Return the process that has locked a run folder, as in "process 12 on host"; "another process" if unknown.

    The file of the lock, LOCK_FILE or LOCK_MARK, contains the id of the process and the host.
    """
    with suppress(OSError, ValueError):
        path = next(p for p in (folder / LOCK_MARK, folder / LOCK_FILE) if p.exists() and p.stat().st_size)
        process_id, host = path.read_text(encoding="utf-8").splitlines()[:2]
        return f"process {int(process_id)} on {host}"
    return "another process"


def _acquire(folder: Path) -> BaseFileLock:
    """Lock a run folder, by LOCK_FILE, or if its file system has no locks by the existence of LOCK_MARK.

    Args:
        folder: The run folder.

    Returns:
        The lock, which the caller must release.

    Raises:
        Timeout: Another process has locked the folder.
        OSError: The lock file cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False)
        lock.acquire()
    except (Timeout, PermissionError):  # both are OSErrors too
        raise
    except (OSError, NotImplementedError) as error:  # the file system has no locks
        path.unlink(missing_ok=True)
        # SECONDS: time to find out that the process that wrote LOCK_MARK has ended
        lock = SoftFileLock(folder / LOCK_MARK, timeout=SECONDS, thread_local=False)
        lock.acquire(poll_interval=SECONDS / 10)
        log.warning(
            "%s: this file system has no locks (%s); the file %s is used as the lock of this process",
            folder,
            getattr(error, "strerror", None) or error,
            LOCK_MARK,
        )
    if not isinstance(lock, SoftFileLock):  # a SoftFileLock writes this itself
        path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    return lock
