"""Store the digest of a large data set, so that a finished run is skipped without loading its data again.

The digest is valid as long as all files below data_dir, and below each path among the options of the data set, are
unchanged.  Data of a user's class are always loaded again, because the class may read other files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedbench.core.files import read_json
from fedbench.data._files import cache_path, written_atomically
from fedbench.data.base import Arrays

# options that concern the split and preprocessing, not what the source loads (config.DatasetKeys)
DATASET_KEYS = ("split", "test_fraction", "val_fraction", "normalize", "augment", "subset")
MIN_BYTES = 16 << 20  # smaller data sets are loaded again
MAX_FILES = 20_000  # data of larger folders are loaded again
CACHE = "cache"  # folder in data_dir that is made from the other files


def load(dataset: Mapping[str, Any], data_dir: str, make: Callable[[], Arrays]) -> Arrays:
    """Return make(), and store the digest of a large data set (at least MIN_BYTES) in data_dir/cache.

    With the stored digest, a finished run can be recognized without loading its data again.  If the file cannot be
    written, nothing is stored.

    Args:
        dataset: The group `dataset` of the configuration.
        data_dir: Folder of the data.
        make: Function that loads the data set.

    Returns:
        The data set, make().
    """
    listing = _listing(dataset, data_dir)  # a hash of the files' names, sizes and times
    arrays = make()
    # a file that was written meanwhile, such as a download, is included the next time
    if arrays.nbytes >= MIN_BYTES and listing is not None and listing == _listing(dataset, data_dir):
        with suppress(OSError), written_atomically(_path(dataset, data_dir)) as partial:
            stored = {"digest": arrays.digest, "listing": listing}
            partial.write_text(json.dumps(stored), encoding="utf-8")
    return arrays


def digest(dataset: Mapping[str, Any], data_dir: str, make: Callable[[], Arrays]) -> str:
    """Return the digest of make(), which is called if no digest is stored or a file has changed.

    Args:
        dataset: The group `dataset` of the configuration.
        data_dir: Folder of the data.
        make: Function that loads the data set.

    Returns:
        The digest (`Arrays.digest`).
    """
    stored = read_json(_path(dataset, data_dir))  # {} without a file
    # listing: a hash of the names, sizes and times of all data files, which shows whether one has changed
    if "digest" in stored and stored.get("listing") == _listing(dataset, data_dir):
        return stored["digest"]
    return load(dataset, data_dir, make).digest


def _path(dataset: Mapping[str, Any], data_dir: str) -> Path:
    """Return the path of the JSON file in data_dir/cache that stores the digest of the data set with these options.

    Options that do not change what is read (`DATASET_KEYS`) have no effect on it.
    """
    source = {key: value for key, value in dataset.items() if key not in DATASET_KEYS}
    return cache_path(data_dir, "digest", json.dumps(source, sort_keys=True), "json")


def _listing(dataset: Mapping[str, Any], data_dir: str) -> str | None:
    """Return a hash of the names, sizes and times of all files of a data set.

    They are the files at data_dir and at all options whose value is a path, without those in the cache.

    Args:
        dataset: The group `dataset` of the configuration.
        data_dir: Folder of the data.

    Returns:
        The hash, in hexadecimal digits.  None: no digest may be stored, because the data set is a user's class or there
        are more than MAX_FILES files.
    """
    if not str(dataset.get("_target_")).startswith("fedbench."):
        return None
    paths = {os.path.abspath(os.path.expanduser(path)) for path in (data_dir, *_texts(dataset)) if path}
    stamps: set[tuple[str, int, int, int]] = set()
    for file in _files(sorted(paths), os.path.join(os.path.abspath(data_dir), CACHE)):
        with suppress(OSError):  # deleted meanwhile
            stat = os.stat(file)
            stamps.add((file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        if len(stamps) > MAX_FILES:
            return None
    return hashlib.sha256(repr(sorted(stamps)).encode()).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """Yield the value if it is a string, else all strings in its lists, tuples and mappings' values, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _files(paths: list[str], cache: str) -> Iterator[str]:
    """Yield all files at some paths.

    Args:
        paths: Files, which are yielded, and folders, whose files at any depth are yielded.  Others are ignored.
        cache: The folder of the cache, which is left out.
    """
    for path in paths:
        if os.path.isfile(path):
            yield path
        for top, below, names in os.walk(path, followlinks=True):
            below[:] = [name for name in below if os.path.join(top, name) != cache]
            yield from (os.path.join(top, name) for name in names)
