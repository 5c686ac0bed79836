"""Arrays inside of pickles, read without letting the pickle call anything but the builders of arrays below.

`np.savez(file, data={"x": x, "y": y})` stores an object array, which is a pickle.  Reading a pickle calls whatever it
names, with arguments that it chooses.  NumPy's own builders are no safe things to call so: np.ndarray takes bytes as
the addresses of objects, and a dtype's state can hide that it holds objects.  The names that NumPy writes therefore
stand for builders of this file, which make arrays of numbers, of text and of objects that the pickle itself built.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError

PLAIN = "biufcSU"  # kinds of dtypes whose bytes are no addresses


class _Dtype:
    """A dtype as pickles build it: a code like f8, then a state that has the order of its bytes."""

    def __init__(self, code: str, align: bool = False, copy: bool = True):
        self.code, self.order = code, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def real(self) -> np.dtype[Any]:
        """The dtype made anew from code and order alone; ConfigError where it has fields, or is no plain one."""
        found = np.dtype(f"{self.order}{self.code}") if isinstance(self.code, str) else np.dtype("V")
        if found.kind not in PLAIN + "O" or found.names is not None or found.subdtype is not None:
            raise ConfigError(f"a dtype {self.code}")
        return found


class _Array(np.ndarray):
    """An array whose state is set by this file; nothing in a pickle may call the class itself."""

    def __new__(cls, *_: Any, **__: Any) -> _Array:
        raise ConfigError("numpy.ndarray of a buffer")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, dtype, fortran, content = state
        real = _Dtype.real(dtype)
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ConfigError(f"an array of shape {shape}")
        if isinstance(content, list) != (real.kind == "O"):
            raise ConfigError("an array of objects from bytes")
        super().__setstate__((version, shape, real, fortran, content))  # type: ignore[misc]


def _reconstruct(*_: Any) -> np.ndarray:
    """An empty array, whatever was asked for: its state says the rest."""
    return np.ndarray.__new__(_Array, (0,))


def _scalar(dtype: _Dtype, content: bytes) -> Any:
    return _from_buffer(content, dtype, ())[()]


def _from_buffer(content: Any, dtype: _Dtype, shape: Any, order: str = "C") -> np.ndarray:
    real = _Dtype.real(dtype)
    if real.kind == "O":
        raise ConfigError("an array of objects from bytes")
    return np.frombuffer(content, real).reshape(shape, order=order)  # type: ignore[call-overload]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ConfigError(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


BUILDERS: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Dtype}
BUILDERS[("_codecs", "encode")] = _encode
for _core in ("core", "_core"):  # as NumPy 1 and NumPy 2 name them
    BUILDERS[(f"numpy.{_core}.multiarray", "_reconstruct")] = _reconstruct
    BUILDERS[(f"numpy.{_core}.multiarray", "scalar")] = _scalar
    BUILDERS[(f"numpy.{_core}.numeric", "_frombuffer")] = _from_buffer


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in BUILDERS:
            raise ConfigError(f"{module}.{name}")
        return BUILDERS[(module, name)]


def read_object(path: Path, name: str, key: str, trust: str, trusted: bool) -> Any:
    """What `np.savez(path, name=object)` stored: dicts and lists of arrays and numbers.

    trusted: whether the pickle in it may call what it likes.  ConfigError for a damaged file, for one without this
    name, and for a pickle that names anything but arrays; `key` is the option that says where the file is, and `trust`
    the one that trusts it.
    """
    try:
        if trusted:
            with np.load(path, allow_pickle=True) as file:
                return file[name].tolist()
        with zipfile.ZipFile(path) as archive:
            content = io.BytesIO(archive.read(f"{name}.npy"))
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        _, _, dtype = header(content)
        if not dtype.hasobject:
            content.seek(0)
            return np.lib.format.read_array(content, allow_pickle=False)
        return _Reader(content).load().tolist()
    except ConfigError as refused:
        raise ConfigError(
            f"{key}: {path} holds more than arrays (its pickle asks for {refused}), which may run code when it is "
            f"read: say {trust} if you know who wrote it"
        ) from None
    except Exception as error:  # of zip files, zlib, NumPy and pickles: all mean the same to the user
        raise ConfigError(f"{key}: {path} cannot be read: {type(error).__name__}: {error}") from error
