"""Keyed random numbers: each draw depends only on its key (seed, purpose, round, client), not on the order of draws.

`generator` and `torch_generator` return ordinary generators seeded by a key.  `bits` and `RowRandom` are counter-based:
one vectorized hash draws for thousands of clients.  Each client gets the numbers that it would get alone.

References:
    Steele, Lea and Flood, OOPSLA 2014 (SplitMix64, the hash).

Letters: K clients, T local steps, B batch size, n samples, E epochs.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GAMMA, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of SplitMix64
MASK = (1 << 64) - 1  # the largest uint64


def key(*parts: int | str) -> int:
    """Return a 64-bit key.

    Args:
        *parts: What the draws depend on, as in ``key(seed, "cohort", round)``.
    """
    # the first letter of the type and the separator keep apart 1 and "1", and ("a", "b") and ("ab",)
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """Return a NumPy generator seeded by a key.

    Args:
        *parts: What the draws depend on, such as the seed, a purpose and the round.
    """
    return np.random.Generator(np.random.Philox(key=key(*parts)))


def torch_generator(*parts: int | str) -> torch.Generator:
    """Return a torch generator on the CPU, seeded by a key.

    Args:
        *parts: What the draws depend on, such as the seed, a purpose and the round.
    """
    return torch.Generator().manual_seed(key(*parts) >> 1)  # 63 bits, the largest positive int64


def bits(base: int, *counters: np.ndarray | int) -> np.ndarray:
    """Return uniform random uint64 numbers, a hash of a key and counters.

    Args:
        base: The key of the draws, 64 bits (`key`).
        *counters: Integers or arrays, such as client ids, which are broadcast against each other.

    Returns:
        uint64 numbers of the broadcast shape.
    """
    with np.errstate(over="ignore"):  # uint64 arithmetic modulo 2^64; _mix and GAMMA are those of SplitMix64
        state = np.asarray(base, np.uint64)
        for counter in counters:
            state = _mix(state + np.asarray(counter).astype(np.uint64) * np.uint64(GAMMA))
    return state


def _mix(z: np.ndarray) -> np.ndarray:
    """Return what the generator SplitMix64 draws next, for each of its states z, as uint64 of the shape of z."""
    z = z + np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX2)
    return z ^ (z >> np.uint64(31))


def client_keys(base: int, ids: np.ndarray) -> np.ndarray:
    """Derive one key per client from a common key, for `RowRandom`.

    Args:
        base: The common key, 64 bits (`key`).
        ids: The clients [K].

    Returns:
        The keys [K] int64.
    """
    return bits(base, ids).view(np.int64)  # a uint64 hash of base and client; torch has no uint64 arithmetic


class RowRandom:
    """Random tensors with one row per client.  Row i depends only on keys[i] and on the number of earlier calls.

    Args:
        keys: One key per client, on the device of the draws.  # [K] int64
    """

    def __init__(self, keys: Tensor):
        self.keys, self.calls = keys, 0

    def random_bits(self, *shape: int) -> Tensor:
        """Return int64 numbers of 64 random bits each, a tensor of the given shape per client.  # [K, *shape]"""
        self.calls += 1
        n = math.prod(shape)
        # with less than 2**40 numbers in a call, no counter occurs in two calls
        counter = torch.arange(n, device=self.keys.device) + (self.calls << 40)  # [n]
        z = _mix_torch(_mix_torch(self.keys)[:, None] + counter)  # a hash of key and counter  [K, n]
        return z.view(len(self.keys), *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 numbers, uniform in [0, 1), a tensor of the given shape per client.  # [K, *shape]"""
        # the upper 24 of 64 bits, as float32 has a precision of 24 bits
        return _shift(self.random_bits(*shape), 40).float() / (1 << 24)

    def normal(self, *shape: int) -> Tensor:
        """Return float32 standard normal numbers, a tensor of the given shape per client.  # [K, *shape]"""
        radius = (1 - self.uniform(*shape)).log().mul(-2).sqrt()  # Box-Muller transform
        return radius * (2 * math.pi * self.uniform(*shape)).cos()


def _signed(c: int) -> int:
    """Return the int64 with the same 64 bits as c, a number from 0 to 2^64 - 1.  Torch has no uint64 arithmetic."""
    return c - (1 << 64) if c >> 63 else c


def _shift(z: Tensor, n: int) -> Tensor:
    """Return int64 numbers shifted to the right by n bits, with zeros on the left, as for uint64 numbers."""
    return (z >> n) & ((1 << (64 - n)) - 1)  # torch's shift fills with the sign bit


def _mix_torch(z: Tensor) -> Tensor:
    """Return the result of `_mix` as an int64 tensor.  Each number stands for the uint64 with the same bits."""
    z = z + _signed(GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(MIX1)
    z = (z ^ _shift(z, 27)) * _signed(MIX2)
    return z ^ _shift(z, 31)


class _Length(NamedTuple):
    """The amount of local work per client in a round, [K] int64 each.

    Attributes:
        batch_size: B_i = min(batch_size, n_i).
        steps_per_epoch: The local steps in an epoch.
        steps: The local steps in total.
    """

    batch_size: np.ndarray
    steps_per_epoch: np.ndarray
    steps: np.ndarray


def _length(
    sizes: np.ndarray,
    batch_size: int | np.ndarray,
    epochs: float | np.ndarray | None,
    steps: int | None,
    drop_last: bool,
    step_fraction: np.ndarray | None,
) -> _Length:
    """Return the batch size and the numbers of local steps of each client.

    Args:
        sizes: Numbers of samples per client [K].
        batch_size: The largest number of samples in a batch, for all clients or for each [K].
        epochs: The local epochs, for all clients or for each [K].  Not used if `steps` is given.
        steps: The local steps of each client with samples; None: given by `epochs`.
        drop_last: Whether an epoch leaves out the last incomplete batch.
        step_fraction: The fraction of its steps that each client takes [K]; None: all.
    """
    batch_sizes = np.minimum(batch_size, sizes)
    divisors = np.maximum(batch_sizes, 1)  # clients without samples: no division by 0
    per_epoch = sizes // divisors if drop_last else -(-sizes // divisors)  # rounded down, or up
    if steps is None:  # 1e-9 is subtracted because a product may be too large by a rounding error
        total = np.ceil(per_epoch * np.asarray(0 if epochs is None else epochs) - 1e-9).astype(np.int64)
    else:
        total = np.where(sizes == 0, 0, steps)
    if step_fraction is not None:
        total = np.ceil(total * step_fraction - 1e-9).astype(np.int64)  # 0.07 * 100 is 7.000000000000001
    return _Length(batch_sizes, per_epoch, total)


def lengths(
    sizes: np.ndarray,
    batch_size: int | np.ndarray,
    *,
    epochs: float | np.ndarray | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    step_fraction: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of steps and samples of `batches`, without drawing the batches.

    Args:
        sizes: Numbers of samples per client [K].
        batch_size: The largest number of samples in a batch, for all clients or for each [K].
        epochs: The local epochs, for all clients or for each [K].  Not used if `steps` is given.
        steps: The local steps of each client with samples; None: given by `epochs`.
        drop_last: Whether an epoch leaves out the last incomplete batch.
        step_fraction: The fraction of its steps that each client takes [K]; None: all.

    Returns:
        Steps [K] and samples [K].
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    length = _length(sizes, batch_size, epochs, steps, drop_last, step_fraction)
    epoch_samples = length.steps_per_epoch * length.batch_size if drop_last else sizes
    whole_epochs, further_steps = np.divmod(length.steps, np.maximum(length.steps_per_epoch, 1))
    return length.steps, whole_epochs * epoch_samples + np.minimum(further_steps * length.batch_size, epoch_samples)


def batches(
    base: int,
    ids: np.ndarray,
    sizes: np.ndarray,
    batch_size: int | np.ndarray,
    *,
    epochs: float | np.ndarray | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    step_fraction: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the batches of all local steps of a round.  Samples are shuffled every epoch.

    Exactly one of epochs and steps must be given.

    Args:
        base: The key of the draws, 64 bits, from `key(seed, ..., round)`.  A client's draws depend on it and on the
            client's id, not on the other clients.
        ids: The clients [K].
        sizes: Their numbers of samples [K].
        batch_size: The largest batch size, one for all clients or one per client [K].  A client has
            B_i = min(batch_size, n_i).
        epochs: The number of local epochs, one for all clients or one per client [K].  Steps are rounded up.
        steps: The number of local steps of all clients.
        drop_last: Whether to drop the last batch of an epoch if it is smaller.
        step_fraction: The fraction of its steps that each client completes [K], rounded up to whole steps.  None: 1.

    Returns:
        Positions [T, K, B] of the samples in each client's list, padded by 0; and the number of samples in each batch,
        [T, K].  It is 0 after a client's last step.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    length = _length(sizes, batch_size, epochs, steps, drop_last, step_fraction)
    per_epoch = np.maximum(length.steps_per_epoch, 1)  # [K]
    width = int(length.batch_size.max(initial=1))  # B
    step = np.arange(int(length.steps.max(initial=0)))[:, None]  # [T, 1]
    epoch, step_in_epoch = np.divmod(step, per_epoch)  # [T, K]
    column = np.arange(width)
    position = step_in_epoch[..., None] * length.batch_size[:, None] + column  # in the order of the epoch  # [T, K, B]
    epoch_samples = np.where(drop_last, length.steps_per_epoch * length.batch_size, sizes)  # [K]
    is_active = (step < length.steps)[..., None]  # [T, K, 1]
    is_real = (column < length.batch_size[:, None]) & (position < epoch_samples[:, None]) & is_active  # [T, K, B]
    num_epochs = int(np.max(-(-length.steps // per_epoch), initial=0))  # of the client with most
    if not num_epochs:
        return np.where(is_real, position, 0), is_real.sum(-1)
    max_size = int(sizes.max(initial=0))
    order = np.stack([_permutations(base, ids, sizes, max_size, e) for e in range(num_epochs)])  # [E, K, n]
    client = np.arange(len(ids))[:, None]  # [K, 1]
    # each client's position in the order of its current epoch; padded steps read any valid entry  # [T, K, B]
    sample = order[np.minimum(epoch, num_epochs - 1)[..., None], client, np.where(is_real, position, 0)]
    return np.where(is_real, sample, 0), is_real.sum(-1)


def subsets(base: int, ids: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Draw a random subset of each client's samples.

    Args:
        base: The key of the draws, 64 bits (`key`).
        ids: The clients [K].
        sizes: Their numbers of samples [K].
        counts: The number of samples to draw [K], at most sizes.

    Returns:
        Ascending positions of the drawn samples in each client's list, one array per client.
    """
    order = _permutations(base, ids, sizes, int(sizes.max(initial=0)), epoch=0)  # of all positions  [K, n]
    return [np.sort(row[:count]) for row, count in zip(order, counts.tolist())]


def _permutations(base: int, ids: np.ndarray, sizes: np.ndarray, max_size: int, epoch: int) -> np.ndarray:
    """Draw the order of each client's samples in an epoch.

    Args:
        base: The key of the draws, 64 bits (`key`).
        ids: The clients [K].
        sizes: Their numbers of samples [K].
        max_size: The largest of sizes.
        epoch: The epoch, from 0, a part of the key.

    Returns:
        Positions in each client's list [K, max_size]: a permutation of those below its size, then the others.
    """
    position = np.arange(max_size)
    draw = bits(base, np.asarray(ids)[:, None], epoch, position)  # [K, max_size]
    draw = np.where(position < sizes[:, None], draw, np.uint64(MASK))  # MASK: the largest number, sorted last
    return np.argsort(draw, axis=1, kind="stable")
