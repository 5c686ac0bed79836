"""Write files atomically, and read JSON files that may be missing or damaged."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DAMAGE = (ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile, OSError)  # what damaged archives raise


def typed_path(text: str) -> Path:
    """Return a path given on the command line with ``~`` expanded, which shells do not do in ``--out=~/file``."""
    return Path(text).expanduser()


@contextmanager
def replacing(path: Path, durable: bool = False, many_writers: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path that replaces the file if the block succeeds.

    Args:
        path: The file.
        durable: Whether to flush the content to the disk first, so that the file is complete even after a crash of the
            machine.
        many_writers: Whether several processes may write the file at once.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial" if many_writers else f"{path.name}.partial")
    try:
        yield partial
        if durable:
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, lines: Iterable[str], durable: bool = True) -> None:
    """Write a text file atomically as UTF-8.

    Args:
        path: The file.
        lines: Its content; line ends are not changed.
        durable: Whether to flush the content to the disk, so that the file is complete even after a crash.

    Raises:
        OSError: The file cannot be written.  An existing file is unchanged.
    """
    with replacing(path, durable) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)


def read_json(path: Path) -> dict[str, Any]:
    """Return the dict in a JSON file; {} if the file is missing or damaged, or has a value of another type."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
