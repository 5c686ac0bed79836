"""Files of data sets: downloads with a checksum, npz files without pickles, and caches written atomically."""

import hashlib
import http.client
import logging
import math
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedbench.core import files
from fedbench.core.files import replacing
from fedbench.core.memory import physical_memory
from fedbench.core.options import ConfigError, require

log = logging.getLogger("fedbench.data")

TIMEOUT_S = 10
# A zip member of more than BOMB unpacked bytes is refused if it is more than BOMB_RATIO times its packed size.
BOMB, BOMB_RATIO = 100_000_000, 200
# What numpy, zipfile, gzip and tarfile raise for damaged or foreign files.
DAMAGE = (*files.DAMAGE, tarfile.TarError)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden: it starts with ".", or is "__MACOSX"."""
    return name.startswith(".") or name == "__MACOSX"


def visible_files(folder: Path) -> list[Path]:
    """Return the sorted paths of all files at any depth below a folder, except hidden files and hidden folders."""
    found: list[Path] = []
    for top, below, names in os.walk(folder):
        below[:] = [name for name in below if not is_hidden(name)]
        found += [Path(top, name) for name in names if not is_hidden(name)]
    return sorted(found)


def md5_of(path: Path) -> str:
    """Return the MD5 checksum of a file as 32 hexadecimal digits, the form in which it is published."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `path` after the block; use it in a with statement.

    If the block raises an exception, the temporary file is deleted and `path` is unchanged.  Absent folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, many_writers=True) as partial:  # runs of a sweep may write the same file at once
        yield partial


def download(urls: list[str], path: Path, md5: str | None, name: str) -> Path:
    """Download a file from the first address that returns the expected bytes.

    Args:
        urls: Addresses, tried in order.
        path: Where to write the file.
        md5: The expected md5, in hexadecimal digits.  None: any.
        name: Name of the data set, for the message.

    Returns:
        `path`.

    Raises:
        ConfigError: No address returns the file.
    """
    reason: object = None
    for url in urls:
        try:
            _download_one(url, path, md5)
            return path
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            # subclasses of URLError, such as HTTPError, have a clear text of their own
            reason = error.reason if type(error) is urllib.error.URLError else error
    raise ConfigError(
        f"{name} is not in {path.parent} and could not be downloaded ({reason}): put {path.name} from "
        f"{urls[0]} into {path.parent.resolve()}, or set dataset.path or data_dir to where it is"
    )


def _download_one(url: str, path: Path, md5: str | None) -> None:
    """Download a file.

    Args:
        url: The address.
        path: Where to write the file.
        md5: The expected md5, in hexadecimal digits.  None: any.

    Raises:
        ValueError: The bytes are incomplete, or have another md5.
        OSError: The address cannot be read, or the file cannot be written.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "fedbench"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply, written_atomically(path) as partial:
        log.info("downloading %s to %s", url, path)
        with open(partial, "wb") as file:
            shutil.copyfileobj(reply, file, length=1 << 20)  # 1 MiB at a time
        expected, size = reply.headers.get("Content-Length"), partial.stat().st_size
        if expected is not None and size != int(expected):
            raise ValueError(f"the connection ended after {size:,} of {int(expected):,} bytes of {url}; try again")
        if md5 is not None and md5_of(partial) != md5:
            raise ValueError(
                f"{url} returned a file with the md5 {md5_of(partial)}, but that of the published file is {md5}; set "
                "dataset.mirror to another address, or dataset.verify=false to accept the file"
            )


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file.

    Args:
        path: The file.

    Returns:
        The arrays by their names in the file.

    Raises:
        ConfigError: The file does not exist, is damaged, or contains a pickle.
    """
    path = Path(path)
    require(path.is_file(), f"{path} does not exist: set dataset.path to an npz file, or data_dir to its folder")
    try:
        _check_sizes(path)
        # mmap_mode avoids reading the data if the file is not an npz but a single array, which is refused.
        file = np.load(path, mmap_mode="r", allow_pickle=False)
        require(
            not isinstance(file, np.ndarray),
            f"{path} holds a single array, but must be an npz file of named arrays: write them by numpy.savez",
        )
        with file:
            arrays = {name: file[name] for name in file.files}  # bytes for a member of the zip that is no array
            return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    except ConfigError:
        raise
    except MemoryError as error:
        raise ConfigError(
            f"{path} does not fit in memory ({error}): write a smaller file, or .npy files for dataset=npy"
        ) from error
    except DAMAGE as error:  # the exceptions of NumPy and zipfile for damaged or foreign files
        with open(path, "rb") as opened:
            first = opened.read(1)
        # NumPy takes any other format for a pickle; real pickles start with byte 0x80, and npz files with P.
        is_pickle_error = "pickle" in str(error)
        if is_pickle_error and first in (b"\x80", b"P"):
            raise ConfigError(
                f"{path} holds pickled Python objects, which could run code and are never loaded: save arrays of "
                "numbers with numpy.savez"
            ) from error
        detail = "" if is_pickle_error else f" ({error})"
        raise ConfigError(
            f"{path} is damaged or not an npz file{detail}: write it again by numpy.savez, or download it again"
        ) from error


def _check_sizes(path: Path) -> None:
    """Raise ValueError if the header of an array in an npz file announces another number of bytes than the file has.

    NumPy would allocate the announced size, which may exceed the memory.  Arrays of objects are not checked, as their
    size is not announced, nor is a file that is no zip.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            with archive.open(info) as file:
                shape, dtype = read_npy_header(file)
                claimed = math.prod(shape) * dtype.itemsize
                actual = info.file_size - file.tell()
            if claimed != actual and not dtype.hasobject:
                name = info.filename.removesuffix(".npy")
                raise ValueError(
                    f"the header of the array {name} announces {claimed:,} bytes, but the file contains {actual:,}"
                    "; write it again"
                )


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of an open .npy file, which is then at the first byte of the data.

    Raises:
        ValueError: The file has no valid header.
    """
    version = np.lib.format.read_magic(file)  # 1.0, 2.0 or 3.0; the last two have a longer field for the header's size
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def require_memory(size: int, what: str) -> None:
    """Refuse data that do not fit in memory once unpacked.

    Args:
        size: Bytes that the header announces.
        what: The file or array, for the error message.

    Raises:
        ConfigError: `size` exceeds the physical memory of the machine.
    """
    total_memory = physical_memory()
    require(
        size <= total_memory,
        f"{what} unpacks to {size / 1e9:,.1f} GB, more than the {total_memory / 1e9:,.1f} GB of memory: "
        "use a smaller file, or a machine with more memory",
    )


def require_unpackable(info: zipfile.ZipInfo, what: str) -> None:
    """Refuse a decompression bomb in a zip.

    Args:
        info: Sizes of a member (a file in the zip) that is text, a picture or a pickle.  An array of equal values may
            have a higher ratio, and must not be checked.
        what: Name of the member, for the error message.

    Raises:
        ConfigError: The member does not fit in memory, or has more than BOMB bytes (100 MB) and a compression ratio
            above BOMB_RATIO (200).
    """
    require_memory(info.file_size, what)
    ratio = info.file_size / max(info.compress_size, 1)
    require(
        info.file_size <= BOMB or ratio <= BOMB_RATIO,
        f"{what} unpacks to {info.file_size / 1e6:,.0f} MB, {ratio:,.0f} times its size, and is not read: more than "
        f"{BOMB_RATIO} times looks like a decompression bomb.  If you trust it, unpack the zip yourself and set "
        "dataset.path to the folder",
    )


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays (by name) to an uncompressed npz file, which replaces `path` only when it is complete."""
    with written_atomically(path) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def cached(data_dir: str, name: str, key: object, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return make(), or the arrays that it returned before, stored in data_dir/cache.

    A damaged cache is made again.  If the cache cannot be written, a warning is logged.

    Args:
        data_dir: Folder that contains the folder cache.
        name: Beginning of the name of the stored file.
        key: Everything that the result depends on.  A hash of its repr is part of the file's name.
        make: Function that returns the arrays.

    Returns:
        Arrays by name.
    """
    path = cache_path(data_dir, name, key, "npz")
    if path.is_file():
        try:
            return read_npz(path)
        except ConfigError as error:
            log.warning("making the cache again: %s", error)
    arrays = make()
    store(path, arrays)
    return arrays


def store(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays (by name) to the npz file `path`; on an OSError, such as a full disk, only log a warning."""
    try:
        write_npz(path, **arrays)
    except OSError as error:
        log.warning(
            "cannot store the converted data in %s (%s): every start converts them again; set data_dir to a folder "
            "that can be written", path, error
        )  # fmt: skip


def cached_array(
    data_dir: str, name: str, key: object, shape: tuple[int, ...], rows: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """Return a uint8 array that is mapped from a file in data_dir/cache, so that it need not fit in memory.

    The file is written if it does not exist or is damaged.

    Args:
        data_dir: Folder that contains the folder cache.
        name: Beginning of the name of the file.
        key: Everything that the result depends on.  A hash of its repr is part of the file's name.
        shape: The shape of the array.
        rows: Function that yields the array's entries along the first axis, in order.

    Returns:
        The array.  Changes of it are not written to the file.

    Raises:
        ConfigError: The cache cannot be written.
    """
    path = cache_path(data_dir, name, key, "npy")
    if path.is_file():
        try:
            return _mapped(path, shape)
        except DAMAGE as error:
            log.warning("making the cache again: %s is damaged (%s)", path, error)
    size = math.prod(shape)
    try:
        with written_atomically(path) as partial:
            free = shutil.disk_usage(path.parent).free
            if free < size:
                raise OSError(f"only {free / 1e9:.1f} GB are free")
            with open(partial, "wb") as file:
                # a .npy file is a header, followed by the bytes of the array ("|u1": uint8)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for row in rows():
                    file.write(np.ascontiguousarray(row, np.uint8).data)
        return _mapped(path, shape)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error}): the decoded pictures of {name} need {size / 1e9:.1f} GB; set "
            "data_dir to a folder with enough free space"
        ) from error


def _mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the uint8 array [*shape] in a .npy file, whose values stay on disk until they are used.

    Raises:
        ValueError: The array has another shape or dtype.
    """
    array = np.load(path, mmap_mode="c", allow_pickle=False)  # c: changes stay in memory
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(
            f"the array has dtype {array.dtype} and shape {array.shape}, but uint8 and {shape} are expected; "
            "delete the file, which is then made again"
        )
    return array


def cache_path(data_dir: str, name: str, key: object, suffix: str) -> Path:
    """Return the path data_dir/cache/<name>-<hash>.<suffix>, where hash is 16 hexadecimal digits for repr(key)."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return Path(data_dir) / "cache" / f"{name}-{digest}.{suffix}"


def fingerprint(path: Path) -> tuple[str, int, int]:
    """Return (name, size in bytes, modification time in ns) of a file, as a cache key that changes with the file."""
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns
