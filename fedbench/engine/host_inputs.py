"""Inputs that stay in host memory or in a file.  Only batches are copied to the device.

One background thread gathers the next batches, so that a local step does not wait for memory or disk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.core.mapped import EntryReader, blocks, can_read_entries, is_read_only_file
from fedbench.core.rows import free_memory
from fedbench.data.base import Arrays

MAX_DEVICE_FRACTION = 0.5  # of the device's free memory, for inputs with hardware.data=auto

Fetched = dict[str, Tensor]  # the inputs of a batch in host memory, by name


class HostInput:
    """One input of all samples, in host memory (`values`) or in a file (`reader`).

    Args:
        values: The input, an array or np.memmap.  # [m, ...]
        device: The compute device.  For CUDA, batches are copied to pinned memory.

    Attributes:
        reader: Reads entries from the file; None if the input is in memory.
        values: The input as a tensor; None if it is in a file.
        pinned: Whether batches are in pinned memory.
        shape: Shape of the input, [m, ...].
        dtype: Its type as a tensor.
    """

    def __init__(self, values: np.ndarray, device: torch.device):
        self.reader = EntryReader(values) if can_read_entries(values) else None
        self.values = None if self.reader else on_device(values, "cpu")
        self.pinned = device.type == "cuda"
        self.shape = tuple(values.shape)
        self.dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the input in memory; 0 if it is in a file."""
        return 0 if self.values is None else self.values.nbytes

    def take(self, index: np.ndarray) -> Tensor:
        """Return copies of entries, in pinned memory if the device is a GPU.

        Args:
            index: Indices of the entries.  # [...]

        Returns:
            The entries.  # [*index.shape, ...]
        """
        flat = index.reshape(-1)
        out = torch.empty(len(flat), *self.shape[1:], dtype=self.dtype, pin_memory=self.pinned)
        if self.reader is not None:  # entries are read from a file
            self.reader.into(out.numpy(), flat)
        elif self.values is not None:
            torch.index_select(self.values, 0, torch.from_numpy(flat), out=out)
        return out.view(*index.shape, *self.shape[1:])


def stay_on_host(arrays: Arrays, where: Literal["auto", "device", "host"], device: torch.device) -> bool:
    """Return whether inputs stay in host memory or in their files.

    Args:
        arrays: The data set.
        where: hardware.data.  "auto" keeps inputs on the host if they need more than MAX_DEVICE_FRACTION of a GPU's
            free memory.  For a CPU, it keeps inputs of read-only files in their files.
        device: The compute device.
    """
    if where != "auto":
        return where == "host"
    parts = arrays.parts().values()  # the inputs, one or several arrays
    if device.type == "cpu":
        return any(map(is_read_only_file, parts))
    return sum(values.nbytes for values in parts) > MAX_DEVICE_FRACTION * free_memory(device)


def on_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Return an array as a tensor on the device.

    On a CPU, both share memory.  An array of a read-only file is copied.
    """
    if not is_read_only_file(values):
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype  # torch's name of the array's type
    out = torch.empty(values.shape, dtype=dtype, device=device)
    start = 0
    for block in blocks(values):  # a part of the file at a time
        out[start : start + len(block)] = torch.from_numpy(np.array(block))
        start += len(block)
    return out


def sample_size(x: Tensor | HostInput) -> int:
    """Return the number of values in one entry of an input [m, ...]: the product of the other axes; 0 if m = 0."""
    return math.prod(x.shape[1:]) if x.shape[0] else 0


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the pool with the one background thread of this process, created at the first call.

    The thread uses one intra-op thread of torch.
    """
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="inputs", initializer=torch.set_num_threads, initargs=(1,)
    )


def run_in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in the one background thread of this process.

    Args:
        work: The function, without arguments.

    Returns:
        A function without arguments that waits until `work` ends, and returns its result or raises its error.
    """
    return _pool().submit(work).result
