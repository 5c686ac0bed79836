"""Arrays inside of pickles, read without letting the pickle call anything but NumPy's own builders of arrays.

`np.savez(file, data={"x": x, "y": y})` stores an object array, which is a pickle.  Reading a pickle calls whatever it
names; here it may name an array, a dtype and a scalar of NumPy, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError

ALLOWED = {  # as NumPy 1 and NumPy 2 name them
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ConfigError(f"{module}.{name}")
        return super().find_class(module, name)


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
