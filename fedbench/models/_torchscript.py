"""Weights of a TorchScript archive, such as OpenAI's CLIP files, read without running its program.

The archive is a zip: data.pkl names the modules' attributes, and data/0, data/1 ... hold the numbers of their tensors.
torch.jit.load would compile and keep the code beside them, and torch.load refuses the archive with weights_only=True.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    **{"FloatStorage": torch.float32, "HalfStorage": torch.float16, "DoubleStorage": torch.float64},
    **{"LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8},
    **{"ByteStorage": torch.uint8, "BoolStorage": torch.bool, "BFloat16Storage": torch.bfloat16},
}


def is_torchscript(path: Path) -> bool:
    """Whether a file is a TorchScript archive: a zip with code beside its data."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.partition("/")[2].startswith("code/") for name in archive.namelist())


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all modules by their dotted names.

    Raises:
        ValueError: The archive is damaged, or holds other objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = _Reader(archive, archive.namelist()[0].partition("/")[0]).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(root, _Module):
        raise ValueError("its data.pkl is not a module")
    return _tensors(root)


class _Module:
    """A module of the archive: its attributes, whatever its class was."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = dict(state)


class _Reader(pickle.Unpickler):
    """Builds modules, tensors and plain values, and calls nothing else that a pickle names."""

    def __init__(self, archive: zipfile.ZipFile, top: str):
        super().__init__(io.BytesIO(archive.read(f"{top}/data.pkl")))
        self.archive, self.top = archive, top
        self.storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return type("Module", (_Module,), {})
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        known: dict[tuple[str, str], Callable] = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch.jit._pickle", "restore_type_tag"): lambda value, _: value,
            **{("torch.jit._pickle", f"build_{kind}list"): lambda value: value for kind in ("int", "double", "bool")},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no weights need")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the numbers of a storage [n]."""
        _, dtype, key, _, count = pid
        if key not in self.storages:
            info = self.archive.getinfo(f"{self.top}/data/{key}")
            if info.file_size != count * dtype.itemsize or info.compress_size < info.file_size:
                raise ValueError(f"data/{key} does not hold {count:,} numbers")
            held = bytearray(self.archive.read(info))
            self.storages[key] = torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)
        return self.storages[key]


def _tensor(storage: Tensor, offset: int, shape: tuple, strides: tuple, *_: Any) -> Tensor:
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and not (0 <= offset <= last < len(storage) and min((*strides, 0)) >= 0):
        raise ValueError(f"a tensor {list(shape)} lies outside of its numbers")
    return storage.as_strided(shape, strides, offset) if math.prod(shape) else storage.new_empty(shape)


def _tensors(module: _Module, prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in module.attributes.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, _Module):
            found |= _tensors(value, f"{prefix}{name}.")
    return found
