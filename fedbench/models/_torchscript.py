"""Read the weights of a TorchScript archive, such as OpenAI's CLIP files, without running its code.

The archive is a zip file: data.pkl has the attributes of modules, and data/0, data/1 ... have the values of their
tensors.  torch.jit.load would also compile and keep the code, and torch.load refuses the archive with
weights_only=True.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbench.data._pickled import check_memo

DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "BFloat16Storage": torch.bfloat16,
}


def is_torchscript(path: Path) -> bool:
    """Return whether a file is a zip archive with a folder "code" in its top folder, as torch.jit.save writes it."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.partition("/")[2].startswith("code/") for name in archive.namelist())


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all modules of a TorchScript archive by their dotted names, such as "visual.conv1.weight".

    Args:
        path: The archive.

    Raises:
        ValueError: The archive is damaged, or its pickle names something that weights do not need.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _Archive(archive).tensors()
    except Exception as error:  # a damaged pickle may raise any exception
        raise ValueError(f"the archive cannot be read ({type(error).__name__}: {error})") from error


class _Module:
    """A module of any class in the archive, with its attributes."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = dict(state)


class _Storage(NamedTuple):
    """The storage of tensors: the file data/<key> of the archive, with count values."""

    dtype: torch.dtype
    key: str
    count: int


class _View(NamedTuple):
    """A tensor of the archive: a view of a storage, as in torch.as_strided."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Recorder(pickle.Unpickler):
    """An unpickler that records modules and tensors, and calls nothing else that the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a class or function that the pickle names.

        Args:
            module: Module of the class or function, such as "torch._utils".
            name: Its name in the module.

        Returns:
            A function or class that records the arguments, or the dtype of a storage.

        Raises:
            pickle.UnpicklingError: It is none of those that files of weights contain.
        """
        if module.split(".")[0] == "__torch__":  # a class of modules, whose code the archive contains
            return _Module
        if module == "torch" and name in DTYPES:  # DTYPES: from "FloatStorage" to torch.float32, and so on
            return DTYPES[name]
        allowed: dict[tuple[str, str], Callable] = {
            ("collections", "OrderedDict"): lambda: None,  # the empty hooks of a tensor
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, strides, *_: _View(
                storage, offset, shape, strides
            ),
            ("torch.jit._pickle", "restore_type_tag"): lambda value, _: value,
            **{("torch.jit._pickle", f"build_{kind}list"): lambda value: value for kind in ("int", "double", "bool")},
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which weights do not need: use a file of weights only"
            )
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a description of the storage to which the pickle refers; its values are read later.

        Args:
            pid: The reference, ("storage", dtype, key, device, count): `count` values are in the file data/<key>.
        """
        _, dtype, key, _, count = pid
        return _Storage(dtype, key, count)


class _Archive:
    """An open archive, whose files are in the folder `top`, and the storages that were read from it."""

    def __init__(self, archive: zipfile.ZipFile):
        self.archive = archive
        self.top = archive.namelist()[0].partition("/")[0]  # the top folder
        self.storages: dict[_Storage, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all modules of the archive, by dotted names such as "visual.conv1.weight"."""
        content = self.archive.read(f"{self.top}/data.pkl")
        check_memo(content)  # bounds the memory that the pickle can use
        root = _Recorder(io.BytesIO(content)).load()  # a tree of modules, with descriptions of their tensors (_View)
        if not isinstance(root, _Module):
            raise ValueError("data.pkl does not contain a module, so the file is damaged: download it again")
        tensors: dict[str, Tensor] = {}
        stack = [("", root, {id(root)})]  # of each module: the prefix of its names, and all modules that contain it
        num_visited = 0
        while stack:
            prefix, module, containing = stack.pop()
            num_visited += 1
            for name, value in module.attributes.items():
                if isinstance(value, _View):
                    tensors[f"{prefix}{name}"] = self._tensor(value)
                elif isinstance(value, _Module):
                    is_cyclic = id(value) in containing
                    # A module is in several others only in a damaged file, which may have very many paths.  In an
                    # intact one, each module takes several bytes of the content.
                    if is_cyclic or num_visited > len(content):
                        raise ValueError("its modules contain each other, so the file is damaged: download it again")
                    stack.append((f"{prefix}{name}.", value, {*containing, id(value)}))
        return tensors

    def _storage(self, storage: _Storage) -> Tensor:
        """Return all values of a storage as a tensor [count] of its dtype; each file is read once.

        Raise ValueError if the file has another number of values.
        """
        if storage not in self.storages:
            dtype, key, count = storage
            info = self.archive.getinfo(f"{self.top}/data/{key}")
            # PyTorch stores tensors uncompressed; a compressed file could unpack to more than the memory
            # file_size: unpacked; compress_size: in the archive
            if info.file_size != count * dtype.itemsize or info.compress_size < info.file_size:
                raise ValueError(
                    f"data/{key} does not have the {count:,} values that data.pkl states, so the file is damaged: "
                    "download it again"
                )
            content = bytearray(self.archive.read(info))
            self.storages[storage] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return self.storages[storage]

    def _tensor(self, view: _View) -> Tensor:
        """Return the values of a view as a tensor of the view's shape, which may be empty.

        Raise ValueError if it reads beyond the end of its storage, or if its shape is damaged.
        """
        values = self._storage(view.storage)
        _, offset, shape, strides = view
        if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)) or len(shape) != len(strides):
            raise ValueError(
                f"a tensor has the offset {offset}, shape {shape} and strides {strides}, expected integers >= 0, so "
                "the file is damaged: download it again"
            )
        if not math.prod(shape):
            return values.new_empty(shape)
        last_index = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        # strides of 0 would make a tensor of any size from one value
        if last_index >= len(values) or math.prod(shape) > len(values):
            raise ValueError(
                f"a tensor of shape {list(shape)} is larger than its storage of {len(values):,} values, so the file is "
                "damaged: download it again"
            )
        return values.as_strided(shape, strides, offset)
