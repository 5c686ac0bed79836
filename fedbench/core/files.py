"""Files that are written whole or not at all, and JSON that may be missing or damaged."""

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
    """Return a path with ``~`` expanded: a shell does not expand it in ``--out=~/file``."""
    return Path(text).expanduser()


@contextmanager
def replacing(path: Path, durable: bool = False, many_writers: bool = False) -> Iterator[Path]:
    """A name to write to, which takes the place of path when the block succeeds and is removed when it fails.

    Whoever reads path sees the old file or the new one, whole.  durable: also after the machine has crashed (the
    content is on the disk before it gets its name).  many_writers: several processes may write the file at once.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial" if many_writers else f"{path.name}.partial")
    try:
        yield partial
        if durable:
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # a full disk has no room for what is left, either
            partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, lines: Iterable[str], durable: bool = True) -> None:
    """Write a text file whole, as UTF-8, line ends as they are given; OSError leaves the old one."""
    with replacing(path, durable) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where the file is missing, cut off, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
