"""Batches of a chunk, the clients that are computed at once, and the loader of these batches.

Letters: k clients, B batch size, b size of a part of a batch, T local steps, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.inputs import map_inputs
from fedbench.core.rng import RowRandom, client_keys, key
from fedbench.engine.federation import Federation, Inputs
from fedbench.engine.host_inputs import Fetched

BLOCK_BYTES = 1 << 20  # inputs of several steps that are gathered at once


@dataclass
class Batch:
    """One batch of k clients: B inputs x and targets y of each, of which the first counts[i] are real, not padding.

    Attributes:
        x: The inputs, one tensor or a dict of tensors.  # [k, B, ...]
        y: The targets.  # [k, B, ...]
        weight: Weights of the samples.  Those of a client sum to 1.  Padding has weight 0.  # [k, B]
        counts: Number of real samples of each client, on the host.  # [k]
        class_mask: Whether each client has each class, or None.  # [k, C] bool
        index: Indices of the samples in the federation, or None.  Those of padding are arbitrary.  # [k, B]
        shared: Whether all clients have the same samples, so that x and y are expanded tensors.
    """

    x: Inputs
    y: Tensor
    weight: Tensor
    counts: np.ndarray
    class_mask: Tensor | None = None
    index: Tensor | None = None
    shared: bool = False

    @property
    def full(self) -> bool:
        """Whether each of the k clients has B real samples, so that no batch is padded."""
        return bool((self.counts == self.weight.shape[1]).all())

    @property
    def real(self) -> Tensor:
        """True for real samples, and False for the padding of clients with fewer samples.  # [k, B] bool"""
        counts = to_device(self.counts, self.weight.device)
        return torch.arange(self.weight.shape[1], device=self.weight.device) < counts[:, None]

    def split(self, parts: int) -> list[Batch]:
        """Split each client's real samples into consecutive parts of about equal size.

        Args:
            parts: Number of parts.  If a client has fewer samples, some of its parts are empty (weight 0).

        Returns:
            One batch for each part.
        """
        edges = [np.ceil(self.counts * i / parts).astype(int) for i in range(parts + 1)]  # [k] each
        return [self.between(start, stop) for start, stop in itertools.pairwise(edges)]

    def between(self, start: np.ndarray, stop: np.ndarray) -> Batch:
        """Return a batch of the samples start[i] to stop[i] - 1 of each client i.

        Args:
            start: Position of the first sample of each client.  # [k]
            stop: Position after the last sample of each client.  # [k]

        Returns:
            The smaller batch, with weights of sum 1.
        """
        counts = stop - start
        width = int(counts.max(initial=1))
        device = self.weight.device
        position = to_device(start, device)[:, None] + torch.arange(width, device=device)  # [k, b]
        is_real = torch.arange(width, device=device) < to_device(counts, device)[:, None]  # else padding  [k, b]
        position = position.clamp_max(self.weight.shape[1] - 1)  # padding may be any sample
        client = torch.arange(len(counts), device=device)[:, None]
        weight = self.weight[client, position] * is_real
        total = weight.sum(1, keepdim=True)
        x = map_inputs(lambda t: t[client, position], self.x)
        index = None if self.index is None else self.index[client, position]
        return Batch(
            x=x,
            y=self.y[client, position],
            weight=weight / total.clamp_min(1e-30),  # no division by 0 for an empty part
            counts=counts,
            class_mask=self.class_mask,
            index=index,
        )

    def take_clients(self, positions: np.ndarray, device_positions: Tensor, width: int) -> Batch:
        """Return the first samples of some clients.

        Args:
            positions: Positions of the clients, on the host.  # [n]
            device_positions: The same positions, on the device.  # [n]
            width: Number of samples of each client.

        Returns:
            The batch of these clients.  # [n, width, ...]
        """
        return Batch(
            x=map_inputs(lambda t: t[device_positions, :width], self.x),
            y=self.y[device_positions, :width],
            weight=self.weight[device_positions, :width],
            counts=self.counts[positions],
            class_mask=None if self.class_mask is None else self.class_mask[device_positions],
            index=None if self.index is None else self.index[device_positions, :width],
        )


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on the device.

    A copy to a GPU is from pinned memory, so that the host does not wait until it ends.
    """
    on_host = torch.from_numpy(np.ascontiguousarray(values))
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)


class BatchLoader:
    """Loads the batches of a chunk, a block of steps at a time: `x` and `y` are those of steps `first` to `stop` - 1.

    Args:
        federation: The data.
        ids: The clients.  # [k]
        index: Indices of the samples in the federation.  Those of padding are arbitrary.  # [T, k, B]
        counts: Number of real samples.  # [T, k]
        random_key: Key of random inputs (augmentation, stochastic tasks).  None: inputs as in an evaluation.
    """

    def __init__(
        self,
        federation: Federation,
        ids: np.ndarray,
        index: np.ndarray,
        counts: np.ndarray,
        random_key: int | None = None,
    ):
        federation.require_samples(ids)
        self.federation, self.counts = federation, counts
        device = federation.device
        self.host_index, self.index = index, torch.from_numpy(index).to(device)
        slots = np.arange(index.shape[2])  # [B]
        weight = (slots < counts[..., None]) / np.maximum(counts, 1)[..., None]  # 1 / count, 0 for padding
        self.weight = torch.from_numpy(weight.astype(np.float32)).to(device)  # [T, k, B]
        self.mask = None if federation.class_mask is None else federation.class_mask[torch.from_numpy(ids)]
        self.is_stochastic = federation.has_stochastic_inputs and random_key is not None
        self.keys = torch.from_numpy(client_keys(random_key or 0, ids)).to(device)
        self.first = self.stop = 0  # the loaded steps
        self.x: Any = None  # inputs of the loaded steps  # [stop - first, k, B, ...]
        self.y: Any = None
        self.next: tuple[int, Callable[[], Fetched | None]] | None = None  # first step and inputs of the next block

    def __call__(self, t: int, k: int) -> Batch:
        """Return the batch of a step.

        Args:
            t: Index of the step.
            k: Number of clients that train in it: the first k.

        Returns:
            The batch of these clients.
        """
        if not self.first <= t < self.stop:
            self._load(t)
        i = t - self.first
        return Batch(
            x=map_inputs(lambda x: x[i, :k], self.x),
            y=self.y[i, :k],
            weight=self.weight[t, :k],
            counts=self.counts[t, :k],
            class_mask=None if self.mask is None else self.mask[:k],
            index=self.index[t, :k],
        )

    def _load(self, t: int) -> None:
        """Load the inputs `x` and targets `y` of step t (from 0), and of as many next steps as fit in about 1 MiB."""
        stop, num_active = self._block(t)  # step after the block, and number of clients that train in step t
        fetched = self._fetch(t) if self.federation.on_host else None
        # index: the samples of all steps  [T, k, B]
        self.x, self.y = self.federation.gather(
            self.index[t:stop, :num_active], training=self.is_stochastic, fetched=fetched
        )
        if self.is_stochastic:  # augmented images, or inputs that the task generates, drawn step by step
            x, y = zip(*(self._stochastic_inputs(t, i, num_active) for i in range(stop - t)))
            self.x, self.y = map_inputs(lambda *steps: torch.stack(steps), *x), torch.stack(y)
        self.first, self.stop = t, stop

    def _stochastic_inputs(self, t: int, i: int, num_active: int) -> tuple[Inputs, Tensor]:
        """Return random inputs and targets of step t + i, which is the i-th step of the loaded block.

        Args:
            t: First step of the block.
            i: Index of the step in the block.
            num_active: Number of clients that train in step t.

        Returns:
            The inputs and targets.  # [num_active, B, ...] each
        """
        # the keys of the clients, combined with that of the step, which is shifted to the 63 bits of an int64
        random = RowRandom(self.keys[:num_active] ^ (key("step", t + i) >> 1))
        return self.federation.stochastic_inputs(map_inputs(lambda x: x[i], self.x), self.y[i], random)

    def _block(self, t: int) -> tuple[int, int]:
        """Return which steps are loaded together with step t, and for how many clients.

        Returns:
            The step after the last one of the block, whose inputs have about BLOCK_BYTES; and the number of clients
            that train in step t.  Later steps have no other clients.
        """
        step_bytes = max(1, self.index[t].numel() * self.federation.sample_bytes)
        stop = min(len(self.index), t + max(1, BLOCK_BYTES // step_bytes))
        return stop, int((self.counts[t] > 0).sum())  # counts: samples of each client in each step  [T, k]

    def _fetch(self, t: int) -> Fetched | None:
        """Return the inputs of the block of steps that begins with t, and start to gather those of the next block.

        Returns:
            The inputs by name, in host memory.  None: inputs are on the device.
        """

        def block_samples(first: int) -> np.ndarray:
            """Return indices of samples in the data set, padding included, of the block from step `first` on.

            Returns:
                The indices for the steps of the block and the clients that still train in it.  # [steps, active, B]
            """
            stop, num_active = self._block(first)
            return self.host_index[first:stop, :num_active]

        # next: first step of a block whose inputs a background thread gathers, and a function that waits for them
        if self.next is not None and self.next[0] == t:
            fetched = self.next[1]()
        else:
            fetched = self.federation.fetch(block_samples(t))
        stop, _ = self._block(t)
        self.next = None
        if stop < len(self.index):
            self.next = (stop, self.federation.fetch_ahead(block_samples(stop)))
        return fetched
