"""Files and folders that a command is told to write: refused before the work where they cannot be, written whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from fedbench.core.files import replacing
from fedbench.core.options import ConfigError, refused, require


def check_file(flag: str, path: Path | None) -> None:
    """Make the folder that a file goes into; ConfigError where the file cannot be written.  None: nothing is asked."""
    if path is None:
        return
    require(path != Path(), f"{flag} names no file")
    with _explained(f"{flag} {path} cannot be written"):
        require(not path.is_dir(), f"{flag} {path} is a folder: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(flag, path if path.exists() else path.parent)


def check_folder(flag: str, path: Path | None) -> None:
    """Make a folder; ConfigError where it cannot be made or written into.  None: nothing is asked."""
    if path is None:
        return
    require(path != Path(), f"{flag} names no folder")
    with _explained(f"{flag} {path} cannot be made"):
        path.mkdir(parents=True, exist_ok=True)
        _check_writable(flag, path)


def write_file(flag: str, path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let write fill a file, which is there when it is whole; a device or a pipe is written to as it is."""
    check_file(flag, path)
    is_device = path.exists() and not path.is_file()
    whole = nullcontext(path) if is_device else replacing(path, many_writers=True)
    with _explained(f"{flag} {path} cannot be written"), whole as target, target.open("wb") as file:
        write(file)


def _check_writable(flag: str, path: Path) -> None:
    require(os.access(path, os.W_OK), f"{flag}: {path} cannot be written into (permission denied)")


@contextmanager
def _explained(sentence: str) -> Iterator[None]:
    """An OSError of the block as ConfigError: the sentence, and what the system says of the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{sentence}: {error.strerror or refused(error)}") from error
