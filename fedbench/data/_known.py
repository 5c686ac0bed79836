"""The digest of a data set, remembered while the files that it can be read from stay as they are.

A finished run is skipped without loading its data again.  The files are everything below data_dir, and below each path
among the options of the data set.  A source of the user may read other files: its data are loaded again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedbench.data._files import cache_path, whole
from fedbench.data.base import Arrays

# what the federation, not the source, does with the samples (config.DatasetKeys)
DATASET_KEYS = ("split", "test_fraction", "val_fraction", "normalize", "augment", "subset")
BIG = 16 << 20  # bytes of arrays from which on the digest is remembered: smaller sets are loaded again
MOST_FILES = 20_000  # of larger folders the data are loaded again
CACHE = "cache"  # below data_dir: made from the other files
_known: "dict[str, Known]" = {}


class Known(NamedTuple):
    """The digest of a data set, and that of the names, sizes and times of its files."""

    digest: str
    listing: str


def key_of(dataset: Mapping[str, Any]) -> str:
    """Return what a data set is remembered by: its source and the source's options."""
    return json.dumps({k: v for k, v in dataset.items() if k not in DATASET_KEYS}, sort_keys=True)


def load(dataset: Mapping[str, Any], data_dir: str, make: Callable[[], Arrays]) -> Arrays:
    """Return make(), and remember its digest."""
    before = _listing(dataset, data_dir)
    arrays = make()
    if arrays.nbytes < BIG or before is None or before != _listing(dataset, data_dir):
        return arrays  # if files were written meanwhile, such as a download, it is remembered the next time
    known = _known[key_of(dataset)] = Known(arrays.digest, before)
    path = cache_path(data_dir, "digest", key_of(dataset), "json")
    with suppress(OSError), whole(path) as partial:  # a data_dir that cannot be written: this process remembers it
        partial.write_text(json.dumps(known), encoding="utf-8")
    return arrays


def digest(dataset: Mapping[str, Any], data_dir: str, make: Callable[[], Arrays]) -> str:
    """Return the digest of make(), which is called if the digest is unknown or a file has changed."""
    key = key_of(dataset)
    known = _known.get(key) or _kept(cache_path(data_dir, "digest", key, "json"))
    if known is None or known.listing != _listing(dataset, data_dir):
        return load(dataset, data_dir, make).digest
    _known[key] = known
    return known.digest


def _kept(path: Path) -> Known | None:
    try:
        text, listing = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return Known(text, listing) if isinstance(text, str) and isinstance(listing, str) else None


def _listing(dataset: Mapping[str, Any], data_dir: str) -> str | None:
    """Return a digest of the names, sizes and times of the files of a data set; None where it cannot be remembered."""
    if not str(dataset.get("_target_")).startswith("fedbench."):
        return None
    paths = [data_dir, *(os.path.expanduser(text) for text in _texts(dataset) if text)]
    stamps: list[tuple[str, int, int, int]] = []
    for path in dict.fromkeys(os.path.abspath(path) for path in paths):
        for stamp in _stamps(path, skip=os.path.join(os.path.abspath(data_dir), CACHE)):
            stamps.append(stamp)
            if len(stamps) > MOST_FILES:
                return None
    return hashlib.sha256(repr(sorted(stamps)).encode()).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _stamps(path: str, skip: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, size, time of writing and time of change of a file, or of all files below a folder."""
    if path == skip:
        return
    try:
        stat = os.stat(path)
        inner = [entry.path for entry in os.scandir(path)] if os.path.isdir(path) else None
    except (OSError, ValueError):  # no path
        return
    if inner is None:
        yield path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    else:
        for below in inner:
            yield from _stamps(below, skip)
