"""Files of data sets: download with a checksum, npz read without running anything, caches written whole.

Every failure is one sentence that says which file was wanted where.
"""

import hashlib
import http.client
import logging
import math
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
BOMB, BOMB_RATIO = 100_000_000, 200  # the ratio of unpacked to packed bytes is limited above this size
# What a damaged or foreign file raises in numpy, zipfile, gzip and tarfile, beside OSError.
DAMAGE = (*files.DAMAGE, tarfile.TarError)


def is_hidden(name: str) -> bool:
    """Return whether a name is that of a hidden file or folder: .ipynb_checkpoints, macOS' ._files and __MACOSX."""
    return name.startswith(".") or name == "__MACOSX"


def md5_of(path: Path) -> str:
    """Hex md5 of a file (an integrity check against the published value, not a signature)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes path if the block succeeds and is removed if it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, many_writers=True) as partial:  # sweeps may write the same file at once
        yield partial


def download(urls: list[str], path: Path, md5: str | None, name: str) -> Path:
    """Fetch the first address that answers with the right bytes; ConfigError if none does.

    urls: tried in order.  md5: None accepts anything.  name: of the data set, for the sentence.
    """
    reason: object = None
    for url in urls:
        try:
            _fetch(url, path, md5)
            return path
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            reason = error.reason if type(error) is urllib.error.URLError else error
    raise ConfigError(
        f"{name} is not in {path.parent} and could not be downloaded ({reason}): put {path.name} from "
        f"{urls[0]} into {path.parent.resolve()}, or set dataset.path or data_dir"
    )


def _fetch(url: str, path: Path, md5: str | None) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedbench"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply, whole(path) as partial:
        log.info("downloading %s to %s", url, path)
        with open(partial, "wb") as file:
            shutil.copyfileobj(reply, file, 1 << 20)
        wanted, size = reply.headers.get("Content-Length"), partial.stat().st_size
        if wanted is not None and size != int(wanted):
            raise ValueError(f"the connection ended after {size:,} of {int(wanted):,} bytes")
        if md5 is not None and md5_of(partial) != md5:
            raise ValueError(f"the md5 of what came is {md5_of(partial)}, not {md5}")


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file; ConfigError where it is missing, damaged or carries a pickle."""
    path = Path(path)
    require(path.is_file(), f"{path} is not there (dataset.path and data_dir say where files are looked for)")
    try:
        _check_sizes(path)
        file = np.load(path, mmap_mode="r", allow_pickle=False)  # a single array is only looked at
        require(not isinstance(file, np.ndarray), f"{path} holds a single array, not an npz of named ones")
        with file:
            arrays = {name: file[name] for name in file.files}
            return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    except ConfigError:
        raise
    except MemoryError as error:
        raise ConfigError(f"{path} does not fit in memory ({error})") from error
    except DAMAGE as error:
        with open(path, "rb") as opened:
            first = opened.read(1)
        # numpy takes whatever is not its own format for a pickle; real ones start with byte 0x80, npz with P.
        if "pickle" in str(error) and first in (b"\x80", b"P"):
            raise ConfigError(
                f"{path} holds pickled Python objects, which could run code and are never loaded: save plain "
                "number arrays with numpy.savez"
            ) from error
        said = "" if "pickle" in str(error) else f" ({error})"
        raise ConfigError(f"{path} is damaged or no npz file{said}") from error


def _check_sizes(path: Path) -> None:
    """ValueError where an array's header claims another number of bytes than the file holds of it: NumPy would ask for
    that memory first."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy"):
                with archive.open(info) as file:
                    claimed = _claimed(file)
                    held = info.file_size - file.tell()
                if claimed is not None and claimed != held:
                    name = info.filename.removesuffix(".npy")
                    raise ValueError(f"{name} claims {claimed:,} bytes and there are {held:,}")


def _claimed(file: IO[bytes]) -> int | None:
    """How many bytes of numbers the header of a .npy file announces; None where it holds objects, or is unreadable."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        return None
    shape, _, dtype = readers[version](file)
    return None if dtype.hasobject else math.prod(shape) * dtype.itemsize


def require_memory(size: int, what: str) -> None:
    """Refuse data that do not fit in memory once unpacked.

    Args:
        size: Bytes that the header announces.
        what: The file or array, for the error message.

    Raises:
        ConfigError: `size` exceeds the physical memory of the machine.
    """
    memory = physical_memory()
    require(size <= memory, f"{what} unpacks to {size / 1e9:,.1f} GB, more than the {memory / 1e9:,.1f} GB of memory")


def require_unpackable(info: zipfile.ZipInfo, what: str) -> None:
    """Refuse a decompression bomb in a zip.

    Args:
        info: A member that is text, a picture or a pickle.  Arrays of one value may have higher ratios.
        what: The member, for the error message.

    Raises:
        ConfigError: The member does not fit in memory, or is large and has too high a compression ratio.
    """
    require_memory(info.file_size, what)
    ratio = info.file_size / max(info.compress_size, 1)
    require(
        info.file_size <= BOMB or ratio <= BOMB_RATIO,
        f"{what} unpacks to {info.file_size / 1e6:,.0f} MB, {ratio:,.0f} times its size, and is not read: more than "
        f"{BOMB_RATIO} times looks like a decompression bomb",
    )


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write an uncompressed npz (read back at the speed of the disk), whole or not at all."""
    with whole(path) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def cached(data_dir: str, name: str, key: object, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What ``make()`` returns, kept in data_dir/cache under its name and a hash of ``key``.

    key: whatever the result depends on (its repr is hashed).  A cache that cannot be read is made again; one
    that cannot be written is a warning, for the next start will be slow too.
    """
    path = cache_path(data_dir, name, key, "npz")
    if path.is_file():
        try:
            return read_npz(path)
        except ConfigError as error:
            log.warning("making the cache again: %s", error)
    arrays = make()
    try:
        write_npz(path, **arrays)
    except OSError as error:
        log.warning("could not keep the converted data in %s (%s): every start converts again", path, error)
    return arrays


def cached_array(
    data_dir: str, name: str, key: object, shape: tuple[int, ...], blocks: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """uint8 [*shape], kept in data_dir/cache as for `cached` and read from there where it is looked at.

    blocks(): the rows, some at a time, so that the whole is never in memory.  ConfigError where there is no room.
    """
    path = cache_path(data_dir, name, key, "npy")
    if path.is_file():
        try:
            return _mapped(path, shape)
        except DAMAGE as error:
            log.warning("making the cache again: %s is damaged (%s)", path, error)
    size = math.prod(shape)
    try:
        with whole(path) as partial:
            free = shutil.disk_usage(path.parent).free
            if free < size:
                raise OSError(f"{free / 1e9:.1f} GB are free")
            with open(partial, "wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for block in blocks():
                    file.write(np.ascontiguousarray(block, np.uint8).data)
        return _mapped(path, shape)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error}): the pictures of {name} take {size / 1e9:.1f} GB there once "
            "decoded, and data_dir says where"
        ) from error


def _mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The uint8 array of a .npy file, on disk until it is looked at; ValueError where it is another one."""
    array = np.load(path, mmap_mode="c", allow_pickle=False)  # c: writable, though never the file
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(f"it holds {array.dtype} {array.shape}")
    return array


def cache_path(data_dir: str, name: str, key: object, suffix: str) -> Path:
    """data_dir/cache/<name>-<hash of the key>.<suffix>"""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return Path(data_dir) / "cache" / f"{name}-{digest}.{suffix}"


def fingerprint(path: Path) -> tuple[str, int, int]:
    """Name, size and time of change: a key that follows the file without reading it."""
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns
