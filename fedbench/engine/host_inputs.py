"""Inputs that stay in host memory, or in a file: a batch's entries are gathered there and then sent to the device.

Gathering ahead is the business of one thread of the process, so that a local step does not wait for memory or disk.
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
from fedbench.core.rows import memory
from fedbench.data.base import Arrays

DEVICE_SHARE = 0.5  # of the device's free memory that inputs may take by hardware.data=auto

Fetched = dict[str, Tensor]  # by the input's name: entries of the samples of a batch, in host memory


class HostInput:
    """One input [m, ...] of all samples, in host memory or in a file (np.memmap), for a device.

    Only batches are pinned (on CUDA), not the whole.  shape, dtype: as those of a tensor.
    """

    def __init__(self, values: np.ndarray, device: torch.device):
        self.reader = EntryReader(values) if can_read_entries(values) else None
        self.values = None if self.reader else on_device(values, "cpu")
        self.pinned = device.type == "cuda"
        self.shape = tuple(values.shape)
        self.dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype

    def take(self, index: np.ndarray) -> Tensor:
        """Entries [*index.shape, ...], copied, in host memory that the device can read without waiting."""
        flat = index.reshape(-1)
        out = torch.empty(len(flat), *self.shape[1:], dtype=self.dtype, pin_memory=self.pinned)
        if self.reader is not None:
            self.reader.into(out.numpy(), flat)
        elif self.values is not None:
            torch.index_select(self.values, 0, torch.from_numpy(flat), out=out)
        return out.view(*index.shape, *self.shape[1:])


def stay_on_host(arrays: Arrays, where: Literal["auto", "device", "host"], device: torch.device) -> bool:
    """Whether inputs stay in host memory (or in their files), by hardware.data.

    auto: on a GPU where they would take more than DEVICE_SHARE of its free memory; on a CPU, whose memory is the
    host's, where they lie in a file.
    """
    if where != "auto":
        return where == "host"
    parts = arrays.parts().values()
    if device.type == "cpu":
        return any(map(is_read_only_file, parts))
    return sum(values.nbytes for values in parts) > DEVICE_SHARE * memory(device)


def on_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """An array as a tensor; one on the CPU shares its memory, unless it lies in a file that cannot be written to."""
    if not is_read_only_file(values):
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)
    out = torch.empty(values.shape, dtype=torch.from_numpy(np.empty(0, values.dtype)).dtype, device=device)
    start = 0
    for block in blocks(values):
        out[start : start + len(block)] = torch.from_numpy(np.array(block))
        start += len(block)
    return out


def sample_size(x: Tensor | HostInput) -> int:
    """How many numbers one entry of an input has; 0 where there is no entry."""
    return math.prod(x.shape[1:]) if x.shape[0] else 0


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "inputs", torch.set_num_threads, (1,))


def ahead(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin some work in the thread that gathers ahead; a call of what is returned waits for its result."""
    return _pool().submit(work).result
