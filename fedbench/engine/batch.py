"""Batches of a chunk of clients: what a local step sees of the data, and their loader.

Letters: k clients, B batch, T steps, C classes.
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

BLOCK_BYTES = 1 << 20  # of batches that are gathered ahead


@dataclass
class Batch:
    """One batch of every client.

    x [k, B, ...] (or a dict of such), y [k, B, ...].  weight [k, B]: each client's weights sum to 1 over its real
    samples, padding has 0.  counts [k]: real samples per client, on the host.  class_mask [k, C] or None.
    index [k, B]: which samples of the federation these are (padding: some sample).
    shared: all clients have the same samples; x and y are one client's, expanded without a copy.
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
        """Whether no client's batch is padded."""
        return bool((self.counts == self.weight.shape[1]).all())

    @property
    def real(self) -> Tensor:
        """Which slots hold a sample.  # [k, B] bool"""
        counts = to_device(self.counts, self.weight.device)
        return torch.arange(self.weight.shape[1], device=self.weight.device) < counts[:, None]

    def split(self, parts: int) -> list[Batch]:
        """Consecutive parts of every client's real samples, as equal as can be.

        A client with fewer samples than parts leaves some of its parts empty (weight 0).
        """
        edges = [np.ceil(self.counts * i / parts).astype(int) for i in range(parts + 1)]
        return [self.between(a, b) for a, b in itertools.pairwise(edges)]

    def between(self, start: np.ndarray, stop: np.ndarray) -> Batch:
        """The samples start[i] <= slot < stop[i] of client i, moved to the front of a narrower batch."""
        counts = stop - start
        width = int(counts.max(initial=1))
        device = self.weight.device
        slot = to_device(start, device)[:, None] + torch.arange(width, device=device)  # [k, b]
        real = torch.arange(width, device=device) < to_device(counts, device)[:, None]
        slot = slot.clamp_max(self.weight.shape[1] - 1)
        client = torch.arange(len(counts), device=device)[:, None]
        weight = self.weight[client, slot] * real
        total = weight.sum(1, keepdim=True)
        x = map_inputs(lambda t: t[client, slot], self.x)
        index = None if self.index is None else self.index[client, slot]
        return Batch(x, self.y[client, slot], weight / total.clamp_min(1e-30), counts, self.class_mask, index)

    def take_clients(self, positions: np.ndarray, where: Tensor, width: int) -> Batch:
        """Some clients' first `width` samples.  positions [n] on the host, where: the same on the device."""
        x = map_inputs(lambda t: t[where, :width], self.x)
        mask = None if self.class_mask is None else self.class_mask[where]
        index = None if self.index is None else self.index[where, :width]
        return Batch(x, self.y[where, :width], self.weight[where, :width], self.counts[positions], mask, index)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; a GPU gets them from pinned memory, so that the host need not wait for it."""
    on_host = torch.from_numpy(np.ascontiguousarray(values))
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)


class BatchLoader:
    """The batches of a chunk, gathered from the federation some steps at a time.

    ids [k]: its clients.  index [T, k, B]: sample numbers (padding 0); counts [T, k]: how many are real.
    random_key: of the keyed draws of augmentation and of the task; None: batches are as evaluations see them.
    """

    def __init__(
        self,
        federation: Federation,
        ids: np.ndarray,
        index: np.ndarray,
        counts: np.ndarray,
        random_key: int | None = None,
    ):
        self.federation, self.counts = federation, counts
        device = federation.device
        self.host_index, self.index = index, torch.from_numpy(index).to(device)
        slots = np.arange(index.shape[2])
        weight = (slots < counts[..., None]) / np.maximum(counts, 1)[..., None]
        self.weight = torch.from_numpy(weight.astype(np.float32)).to(device)  # [T, k, B]
        self.mask = None if federation.class_mask is None else federation.class_mask[torch.from_numpy(ids)]
        self.draws = federation.draws and random_key is not None
        self.keys = torch.from_numpy(client_keys(random_key or 0, ids)).to(device)
        self.first = self.stop = 0  # the steps that are loaded
        self.x: Any = None  # [steps, k, B, ...], or a dict of such
        self.y: Any = None
        self.next: tuple[int, Callable[[], Fetched | None]] | None = None  # a block's first step, and its inputs

    def __call__(self, t: int, k: int) -> Batch:
        """The batch of step t for the first k clients."""
        if not self.first <= t < self.stop:
            self._load(t)
        i = t - self.first
        return Batch(
            map_inputs(lambda x: x[i, :k], self.x),
            self.y[i, :k],
            self.weight[t, :k],
            self.counts[t, :k],
            None if self.mask is None else self.mask[:k],
            self.index[t, :k],
        )

    def _load(self, t: int) -> None:
        """Gather (and draw) the batches of step t and of as many after it as BLOCK_BYTES hold."""
        stop, active = self._block(t)
        fetched = self._fetch(t) if self.federation.on_host else None
        self.x, self.y = self.federation.gather(self.index[t:stop, :active], self.draws, fetched)
        if self.draws:
            x, y = zip(*(self._drawn(t, i, active) for i in range(stop - t)))
            self.x, self.y = map_inputs(lambda *steps: torch.stack(steps), *x), torch.stack(y)
        self.first, self.stop = t, stop

    def _drawn(self, t: int, i: int, active: int) -> tuple[Inputs, Tensor]:
        """The i-th batch of the block from step t on, as it is trained on."""
        random = RowRandom(self.keys[:active] ^ key("step", t + i) >> 1)
        return self.federation.drawn(map_inputs(lambda x: x[i], self.x), self.y[i], random)

    def _block(self, t: int) -> tuple[int, int]:
        """The block of steps from t on: where it ends, and how many clients train in it."""
        step_bytes = max(1, self.index[t].numel() * self.federation.sample_bytes)
        return min(len(self.index), t + max(1, BLOCK_BYTES // step_bytes)), int((self.counts[t] > 0).sum())

    def _fetch(self, t: int) -> Fetched | None:
        """Inputs in host memory of the block from step t on; those of the next block are gathered from now on."""

        def samples(first: int) -> np.ndarray:
            stop, active = self._block(first)
            return self.host_index[first:stop, :active]

        fetched = self.next[1]() if self.next and self.next[0] == t else self.federation.fetch(samples(t))
        stop, _ = self._block(t)
        self.next = (stop, self.federation.fetch_ahead(samples(stop))) if stop < len(self.index) else None
        return fetched
