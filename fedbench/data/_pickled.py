"""Safe reading of pickles that hold arrays, lists and plain values.

A pickle names callables, and unpickling calls them with arguments of the pickle's choice.  NumPy's builders are not
safe either: with an array over a foreign buffer, or an array of objects, later opcodes may overwrite pointers.
Unpickling therefore only records the names that NumPy writes.  Arrays are built afterwards from copied bytes.  Arrays
of objects become lists.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.options import ConfigError
from fedbench.data._files import require_unpackable

NUMBERS_AND_TEXT = "biufcSU"  # kinds of dtypes that hold no pointers
ARRAY = ("numpy", "ndarray")
DTYPE = ("numpy", "dtype")
ENCODE = ("_codecs", "encode")  # encoding of bytes in protocol 2
NO_BYTES = [("__builtin__", "bytes"), ("builtins", "bytes")]  # b"" in protocol 2
EMPTY = [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]  # array; NumPy 1 and NumPy 2
SCALAR = [(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")]  # a number
BUFFER = [(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")]  # array of protocol 5
ALLOWED = {ARRAY, DTYPE, ENCODE, *NO_BYTES, *EMPTY, *SCALAR, *BUFFER}
MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class NotPlainError(Exception):
    """The pickle contains more than arrays and plain values; the message names it."""


class _Call:
    """A recorded call of an allowed function in a pickle, with the state that the pickle sets on its result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: tuple[str, str], args: tuple[Any, ...]):
        self.name = name
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """An allowed function that a pickle names.  A call of it returns a record of the call, and nothing is run."""

    __slots__ = ("name",)

    def __init__(self, name: tuple[str, str]):
        self.name = name

    def __call__(self, *args: Any) -> _Call:
        return _Call(self.name, args)

    def __setstate__(self, state: Any) -> None:
        raise NotPlainError(f"a state of {'.'.join(self.name)}")


class _Recorder(pickle.Unpickler):
    """An unpickler that records calls of the allowed names as `_Call`, and refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a function that the pickle names (pickle calls this method).

        A call of the stand-in is recorded, and nothing is run.

        Args:
            module: The module of the function.
            name: The name of the function.

        Raises:
            NotPlainError: The function is not one of ALLOWED.
        """
        if (module, name) not in ALLOWED:
            raise NotPlainError(f"{module}.{name}")
        return _Name((module, name))


def read_plain(content: bytes) -> Any:
    """Read a pickle of arrays, lists, dicts and plain values, from Python 2 too.

    Args:
        content: The pickle.

    Returns:
        The object.  Arrays of objects are lists, and an array of one object without a dimension is that object.

    Raises:
        NotPlainError: The pickle names anything else than what NumPy writes for arrays of numbers and text.
        Exception: The pickle is damaged; this may raise an exception of any class.
    """
    check_memo(content)  # limits the size of the pickle's table of repeated objects
    # the calls in the pickle are recorded instead of made; then those of NumPy's arrays and numbers are replaced
    recorded = _Recorder(io.BytesIO(content), encoding="latin1").load()
    return _Builder(size=len(content)).build(recorded)  # size: the limit of the result grows with it


def check_memo(content: bytes) -> None:
    """Raise ValueError for a pickle with a memo index beyond its length in bytes.

    The memo is a pickle's table of repeated objects.  A large index would make Python allocate a huge table.
    """
    for opcode, value, _ in pickletools.genops(content):
        if opcode.name in MEMO and isinstance(value, int) and value > len(content):  # MEMO: opcodes that write to it
            raise ValueError(
                f"the pickle has a memo index of {value}, but only {len(content)} bytes, so that it is damaged"
            )


def read_object(path: Path, name: str, key: str, trust: str, trusted: bool) -> Any:
    """Read what `np.savez(path, name=object)` stored: dicts and lists of arrays and plain values.

    Args:
        path: The npz file.
        name: The name of the array in it.
        key: The option that says where the file is, for error messages, such as "dataset.path=data".
        trust: The option that trusts the file, for error messages, such as "dataset.trust=data".
        trusted: Whether the pickle may call the functions that it names, and so run code.

    Returns:
        The stored object.

    Raises:
        ConfigError: The file is damaged or lacks the name, or its pickle names more than arrays.
    """
    try:
        if trusted:
            with np.load(path, allow_pickle=True) as file:
                return file[name].tolist()  # of an array without dimensions, the object in it
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(f"{name}.npy")
            require_unpackable(info, f"{key}: {name} of {path}")
            content = io.BytesIO(archive.read(info))
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        _, _, dtype = header(content)  # shape, order and dtype; now content is at the data
        if not dtype.hasobject:
            content.seek(0)
            return np.lib.format.read_array(content, allow_pickle=False)
        return read_plain(content.read())
    except ConfigError:
        raise
    except NotPlainError as refused:
        raise ConfigError(not_plain(f"{key}: {path}", refused, trust)) from None
    except Exception as error:  # of zip files, zlib, NumPy and pickles: all mean the same to the user
        raise ConfigError(
            f"{key}: {path} cannot be read: {type(error).__name__}: {error}; write the file again with its program"
        ) from error


def not_plain(file: str, refused: NotPlainError, trust: str) -> str:
    """Return the message that refuses a pickle.

    Args:
        file: The file, or the option that names it.
        refused: The error, whose text is what the pickle asks for.
        trust: The option that trusts the file, such as "dataset.trust=data".
    """
    return (
        f"{file} holds more than arrays (its pickle asks for {refused}), which may run code when it is "
        f"read: set {trust} if you trust its author"
    )


class _Builder:
    """Replaces each recorded call in a value by its array or number, kept in ``arrays`` by the call's id.

    A pickle may name one list many times, so that a short pickle stands for a huge value.  The entries and bytes that
    are built are therefore limited.

    Args:
        size: Bytes of the pickle.
    """

    def __init__(self, size: int):
        self.left = 4 * size + 1000  # entries and bytes that may still be built
        self.arrays: dict[int, Any] = {}  # by recorded call, so that each array is built once

    def build(self, value: Any) -> Any:
        """Return a value in which arrays and numbers replace the recorded calls.

        Args:
            value: What `_Recorder` read: plain values, lists and dicts that may contain recorded calls (`_Call`).

        Raises:
            NotPlainError: A call builds neither an array nor a number.
        """
        if isinstance(value, _Call):  # of NumPy: an array or a number
            if id(value) not in self.arrays:  # the pickle may contain a call many times
                self.arrays[id(value)] = self._call(value)
            return self.arrays[id(value)]
        if isinstance(value, dict):
            self._count(len(value))  # bounds the memory of a pickle that repeats its lists
            return {self.build(k): self.build(v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            self._count(len(value))
            # A list may hold millions of numbers: avoid a call for each.
            return type(value)([v if type(v) in (int, float, str) else self.build(v) for v in value])
        if isinstance(value, _Name):  # a function that the pickle does not call
            raise NotPlainError(".".join(value.name))
        return value

    def _count(self, size: int) -> None:
        """Subtract a size from ``left``, how much may still be built from the pickle; raise ValueError below 0.

        Args:
            size: Number of list entries, or bytes of an array, that are built next.
        """
        self.left -= size
        if self.left < 0:
            raise ValueError(
                "the pickle repeats its lists too often, so that its content would be much larger than the file"
            )

    def _call(self, call: _Call) -> Any:
        """Return the value that a recorded call of NumPy or codecs builds.

        Args:
            call: The call: its (module, function) name, its arguments args, and the state that the pickle sets on the
                result.

        Returns:
            An array, a number, a list (for an array of objects), or bytes.

        Raises:
            NotPlainError: The call has other arguments than NumPy writes.
        """
        if call.name in EMPTY:  # an array, whose content is in the state
            _, shape, dtype, fortran, content = call.state  # version, shape, dtype, Fortran order, bytes or objects
            if isinstance(content, list) and _code(dtype).startswith("O"):  # O: Python objects
                return self._objects(content, shape)
            return self._array(content, dtype, shape, "F" if fortran else "C")
        if call.name in SCALAR:  # a single number of NumPy
            dtype, content = call.args
            return self._array(content, dtype, (), "C")[()]
        if call.name in BUFFER:  # an array as pickle protocol 5 stores it
            content, dtype, shape, order = call.args
            return self._array(content, dtype, shape, order)
        if call.name == ENCODE:  # bytes as protocol 2 stores them: a text to encode
            return _encoded(*call.args)
        if call.name in NO_BYTES and not call.args:
            return b""
        raise NotPlainError(f"{'.'.join(call.name)} of {len(call.args)} arguments")

    def _objects(self, content: list[Any], shape: Any) -> Any:
        """Return an array of objects as nested lists of its shape, or the object itself if the shape is ().

        Args:
            content: The objects, in C order.
            shape: The shape of the array, as the pickle states it.

        Raises:
            NotPlainError: The shape is invalid, or does not fit the number of objects.
        """
        if not _is_shape(shape) or math.prod(shape) != len(content):
            raise NotPlainError(f"object arrays of shape {shape!r}")
        values = self.build(content)
        for size in reversed(shape[1:]):  # group the list by the last axis, then by the one before it, ...
            values = [values[i : i + size] for i in range(0, len(values), size)] if size else []
        return values if shape else values[0]

    def _array(self, content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
        """Return bytes as an array, which is a copy.

        Args:
            content: The bytes, text that stands for bytes (Python 2), or a recorded call that returns them.
            dtype: The recorded call of numpy.dtype.
            shape: The shape, a tuple of integers if the pickle is valid.
            order: "F" for an array in Fortran order; any other value for C order.

        Raises:
            NotPlainError: One of them has another type.
        """
        if isinstance(content, _Call):
            content = self._call(content)
        if isinstance(content, str):  # bytes of Python 2
            content = content.encode("latin1")
        if not isinstance(content, bytes | bytearray):
            raise NotPlainError(f"arrays from a {type(content).__name__}")
        if not _is_shape(shape):
            raise NotPlainError(f"arrays of shape {shape!r}")
        self._count(len(content))  # limits the memory that all values together need
        return np.frombuffer(content, _dtype(dtype)).reshape(shape, order="F" if order == "F" else "C").copy()


def _is_shape(shape: Any) -> bool:
    """Return whether a value is a valid shape of an array: a tuple of integers >= 0."""
    return isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)


def _code(dtype: Any) -> str:
    """Return the type code of a NumPy dtype in a pickle, such as "f8" for float64.

    Args:
        dtype: The recorded call of numpy.dtype in the pickle.

    Raises:
        NotPlainError: The value is not such a call.
    """
    if not (isinstance(dtype, _Call) and dtype.name == DTYPE and dtype.args and isinstance(dtype.args[0], str)):
        raise NotPlainError("arrays without a dtype")
    return dtype.args[0].removeprefix("|")


def _dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of numbers or text that a pickle describes.

    Only its code and byte order are used, so that it can hide neither fields nor objects.

    Args:
        dtype: The recorded call of numpy.dtype in the pickle.

    Raises:
        NotPlainError: It is no such call, or a dtype of other values.
    """
    code, state = _code(dtype), dtype.state  # such as "f8"; NumPy's state is (version, byte order, ...)
    # "|": the dtype has no byte order, or the state does not tell it
    order = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "=") else "|"
    found = np.dtype(f"{order}{code}")
    if found.kind not in NUMBERS_AND_TEXT or found.names is not None or found.subdtype is not None:
        raise NotPlainError(f"a dtype {code}")
    return found


def _encoded(text: Any, encoding: Any) -> bytes:
    """Return bytes that a pickle (of protocol 2) stores as latin1 text.

    Raise NotPlainError if text is no str, or encoding is not "latin1".
    """
    if not (isinstance(text, str) and encoding == "latin1"):
        raise NotPlainError(f"_codecs.encode to {encoding}")
    return text.encode("latin1")
