"""The digest of a data set, remembered while the files that it was read from stay as they are.

Python tells its audit hooks of every file and folder that it opens, so that no source has to say what it read.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedbench.data._files import cache_path, whole
from fedbench.data.base import Arrays

# what the federation, not the source, does with the samples (config.DatasetKeys)
DATASET_KEYS = ("split", "test_fraction", "val_fraction", "normalize", "augment", "subset")
BIG = 16 << 20  # bytes of arrays from which on the digest is kept in data_dir/cache: smaller sets are just loaded
EVENTS = ("open", "os.scandir", "os.listdir", "fedbench.read")
CODE = (".py", ".pyc", ".so")
_opened: list[set[str]] = []  # of the loads under way
_known: "dict[str, Known]" = {}


class Known(NamedTuple):
    """A digest, and [size, time of writing, time of change] of each file it depends on."""

    digest: str
    files: dict[str, list[int]]

    def holds(self) -> bool:
        """Whether these files are as they were."""
        return all(_stamp(path) == stamp for path, stamp in self.files.items())


def key_of(dataset: Mapping[str, Any]) -> str:
    """What a set is known by: its source and the options of that."""
    return json.dumps({k: v for k, v in dataset.items() if k not in DATASET_KEYS}, sort_keys=True)


def load(key: str, data_dir: str, make: Callable[[], Arrays]) -> Arrays:
    """make(), whose digest is remembered under a key."""
    with _reading() as opened:
        arrays = make()
    stamps = {path: stamp for path in sorted(opened) if (stamp := _stamp(path))}
    _known[key] = known = Known(arrays.digest, stamps)
    if arrays.nbytes >= BIG and stamps:
        path = cache_path(data_dir, "digest", key, "json")
        with suppress(OSError), whole(path) as partial:  # a data_dir that cannot be written: it is loaded again
            partial.write_text(json.dumps(known), encoding="utf-8")
    return arrays


def digest(key: str, data_dir: str, make: Callable[[], Arrays]) -> str:
    """The digest of what make() returns, which is called if it is unknown, or if a file has changed."""
    known = _known.get(key) or _kept(cache_path(data_dir, "digest", key, "json"))
    if known is None or not known.holds():
        return load(key, data_dir, make).digest
    _known[key] = known
    return known.digest


def _kept(path: Path) -> Known | None:
    try:
        text, files = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return Known(text, files) if isinstance(text, str) and isinstance(files, dict) else None


def _stamp(path: str) -> list[int]:
    """[] where there is neither a file nor a folder."""
    try:
        stat = os.stat(path)
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


@contextmanager
def _reading() -> Iterator[set[str]]:
    """The files and folders that are opened while the block runs."""
    _listen()
    _opened.append(opened := set())
    try:
        yield opened
    finally:
        _opened.remove(opened)


@cache
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _opened or event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
        return
    path = os.path.abspath(os.fspath(arguments[0]))
    if isinstance(path, str) and not path.endswith(CODE) and not path.startswith(("/proc", "/dev", "/sys")):
        for opened in _opened:
            opened.add(path)
