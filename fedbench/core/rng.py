"""Keyed randomness: every draw is a function of (seed, purpose, round, client, step), never of order.

Two forms.  `generator` and `torch_generator` are ordinary generators for one keyed purpose.  `bits`
and `RowRandom` are counter based (SplitMix64, Steele et al., OOPSLA 2014): the draws of thousands of
clients come from one vectorized hash, equal to the draws each client would get alone.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GAMMA, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def key(*parts: int | str) -> int:
    """A 64-bit key for a purpose: key(seed, "cohort", round)."""
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator of its own for one purpose."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))


def torch_generator(*parts: int | str) -> torch.Generator:
    """A CPU torch generator of its own for one purpose."""
    return torch.Generator().manual_seed(key(*parts) >> 1)


def bits(base: int, *counters: np.ndarray | int) -> np.ndarray:
    """Uniform uint64 for every combination of the broadcast counters; each is hashed in turn."""
    with np.errstate(over="ignore"):
        state = np.asarray(base, np.uint64)
        for counter in counters:
            state = _mix(state + np.asarray(counter).astype(np.uint64) * np.uint64(GAMMA))
    return state


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    return z ^ (z >> np.uint64(31))


def client_keys(base: int, ids: np.ndarray) -> np.ndarray:
    """One int64 key per client, for RowRandom.  # [K]"""
    return bits(base, ids).view(np.int64)


class RowRandom:
    """Random tensors with a leading client axis; row i depends on keys[i] and the number of the call only.

    keys: int64 [k] on the device where the draws are wanted.
    """

    def __init__(self, keys: Tensor):
        self.keys, self.calls = keys, 0

    def words(self, *shape: int) -> Tensor:
        """64 random bits each, as int64.  # [k, *shape]"""
        self.calls += 1
        n = math.prod(shape)
        counter = torch.arange(n, device=self.keys.device) + (self.calls << 40)  # [n]
        z = _mix_torch(_mix_torch(self.keys)[:, None] + counter)  # [k, n]
        return z.view(len(self.keys), *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), float32 with 24 random bits.  # [k, *shape]"""
        return _shift(self.words(*shape), 40).float() / (1 << 24)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal (Box-Muller).  # [k, *shape]"""
        radius = (1 - self.uniform(*shape)).log().mul(-2).sqrt()
        return radius * (2 * math.pi * self.uniform(*shape)).cos()


def _signed(c: int) -> int:
    return c - (1 << 64) if c >> 63 else c


def _shift(z: Tensor, n: int) -> Tensor:
    return (z >> n) & ((1 << (64 - n)) - 1)  # torch shifts int64 arithmetically


def _mix_torch(z: Tensor) -> Tensor:
    z = z + _signed(GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(MIX1)
    z = (z ^ _shift(z, 27)) * _signed(MIX2)
    return z ^ _shift(z, 31)


class _Length(NamedTuple):
    """Of each client: its batch size B_i = min(batch_size, n_i), its steps in an epoch and in all.  # [K] each"""

    batch_size: np.ndarray
    steps_per_epoch: np.ndarray
    steps: np.ndarray


def _length(
    sizes: np.ndarray,
    batch_size: int,
    epochs: int | np.ndarray | None,
    steps: int | None,
    drop_last: bool,
    step_fraction: np.ndarray | None,
) -> _Length:
    batch_sizes = np.minimum(batch_size, sizes)
    at_least_one = np.maximum(batch_sizes, 1)
    per_epoch = sizes // at_least_one if drop_last else -(-sizes // at_least_one)
    in_all = per_epoch * (0 if epochs is None else epochs) if steps is None else np.where(sizes == 0, 0, steps)
    if step_fraction is not None:
        in_all = np.ceil(in_all * step_fraction - 1e-9).astype(
            np.int64
        )  # 0.07 of 100 is 7.000000000000001 in floating point
    return _Length(batch_sizes, per_epoch, in_all)


def lengths(
    sizes: np.ndarray,
    batch_size: int,
    *,
    epochs: int | np.ndarray | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    step_fraction: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """How many steps [K] and samples [K] the batches of clients with these sizes [K] hold, without drawing them."""
    sizes = np.asarray(sizes, dtype=np.int64)
    length = _length(sizes, batch_size, epochs, steps, drop_last, step_fraction)
    epoch_samples = length.steps_per_epoch * length.batch_size if drop_last else sizes
    whole_epochs, further_steps = np.divmod(length.steps, np.maximum(length.steps_per_epoch, 1))
    return length.steps, whole_epochs * epoch_samples + np.minimum(further_steps * length.batch_size, epoch_samples)


def batches(
    base: int,
    ids: np.ndarray,
    sizes: np.ndarray,
    batch_size: int,
    *,
    epochs: int | np.ndarray | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    step_fraction: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Which samples every client takes at every local step: shuffled anew each epoch.

    ids, sizes [K]: the clients and their numbers of samples.  B_i = min(batch_size, n_i), as the PFL papers do.
    Returns positions [T, K, B] within each client's list (padding: 0) and counts [T, K], how many of the B are
    real; a client whose work is done has count 0.  Exactly one of epochs (of all, or [K]) and steps is given.
    step_fraction [K]: the fraction of them that a client does, rounded up to whole steps (None: all).
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    length = _length(sizes, batch_size, epochs, steps, drop_last, step_fraction)
    per_epoch = np.maximum(length.steps_per_epoch, 1)  # [K]
    width = int(length.batch_size.max(initial=1))  # B
    step = np.arange(int(length.steps.max(initial=0)))[:, None]  # [T, 1]
    epoch, step_in_epoch = np.divmod(step, per_epoch)  # [T, K]
    slot = np.arange(width)
    place = step_in_epoch[..., None] * length.batch_size[:, None] + slot  # in the epoch's order  # [T, K, B]
    limit = np.where(drop_last, length.steps_per_epoch * length.batch_size, sizes)  # samples of an epoch  # [K]
    works = (step < length.steps)[..., None]
    real = (slot < length.batch_size[:, None]) & (place < limit[:, None]) & works  # [T, K, B]
    begun = int(np.max(-(-length.steps // per_epoch), initial=0))  # epochs, of the client that has most
    if not begun:
        return np.where(real, place, 0), real.sum(-1)
    longest = int(sizes.max(initial=0))
    order = np.stack([_permutations(base, ids, sizes, longest, e) for e in range(begun)])  # [E, K, n]
    client = np.arange(len(ids))[:, None]
    sample = order[np.minimum(epoch, begun - 1)[..., None], client, np.where(real, place, 0)]
    return np.where(real, sample, 0), real.sum(-1)


def _permutations(base: int, ids: np.ndarray, sizes: np.ndarray, longest: int, epoch: int) -> np.ndarray:
    """The order of every client's samples in an epoch, those beyond its own number last.  # [K, n]"""
    place = np.arange(longest)
    draw = bits(base, np.asarray(ids)[:, None], epoch, place)  # [K, n]
    draw = np.where(place < sizes[:, None], draw, np.uint64(MASK))
    return np.argsort(draw, axis=1, kind="stable")
