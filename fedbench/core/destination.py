"""Output files and folders of commands: checked before the work begins, and written atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from fedbench.core.files import replacing
from fedbench.core.options import ConfigError, refused, require


def check_file(flag: str, path: Path | None) -> None:
    """Check that a file can be written, and make its folder.

    Args:
        flag: The flag of the command, for error messages, such as "--out".
        path: The file; None if the flag is not given.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        return
    require(path != Path(), f'{flag} must name a file, but is empty or ".": name a new file')
    with _os_errors_explained(f"{flag} {path} cannot be written", "name another file"):
        require(not path.is_dir(), f"{flag} {path} is a folder: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(flag, path if path.exists() else path.parent)


def check_folder(flag: str, path: Path | None) -> None:
    """Make a folder, and check that it is writable.

    Args:
        flag: The flag of the command, for error messages, such as "--out".
        path: The folder; None if the flag is not given.

    Raises:
        ConfigError: The folder cannot be made, or is not writable.
    """
    if path is None:
        return
    require(path != Path(), f'{flag} must name a folder, but is empty or ".": name a new folder')
    with _os_errors_explained(f"{flag} {path} cannot be made", "name another folder"):
        path.mkdir(parents=True, exist_ok=True)
        _check_writable(flag, path)


def write_file(flag: str, path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: it has the old content until all of the new content is written.

    A device or a pipe is written directly.

    Args:
        flag: The flag of the command, for error messages, such as "--out".
        path: The file.
        write: Writes the content into an open file.

    Raises:
        ConfigError: The file cannot be written.
    """
    check_file(flag, path)
    is_device = path.exists() and not path.is_file()
    destination = nullcontext(path) if is_device else replacing(path, many_writers=True)
    explained = _os_errors_explained(f"{flag} {path} cannot be written", "name a file on another disk, or free space")
    with explained, destination as target, target.open("wb") as file:
        write(file)


def _check_writable(flag: str, path: Path) -> None:
    """Raise ConfigError, naming the flag, if this process may not write into the existing file or folder `path`."""
    require(os.access(path, os.W_OK), f"{flag}: {path} is not writable (permission denied); name another path")


@contextmanager
def _os_errors_explained(failure: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError, "<failure>: <the system's message>; <remedy>".

    Args:
        failure: What cannot be done, such as "--out x.csv cannot be written".
        remedy: What the user can do, such as "name another file".
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{failure}: {error.strerror or refused(error)}; {remedy}") from error
