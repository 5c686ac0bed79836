"""Rows, keys and messages for tests of fedbench/compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbench.compression.base import Compressor, Message, Span
from fedbench.core.rng import RowRandom


def message(size: int, clients: int = 1, spans: Mapping[str, Span] | None = None) -> Message:
    """Of the clients 0, 1, ..."""
    return Message("theta", size, np.arange(clients), spans or {})


def draws(clients: int = 1, seed: int = 0) -> RowRandom:
    """With a key for each."""
    return RowRandom(torch.arange(clients) + 1000 * seed)


def rows(*numbers: Sequence[float]) -> Tensor:
    """float32 [k, n]."""
    return torch.tensor(numbers, dtype=torch.float32)


def seen(
    compressor: Compressor, x: Tensor, spans: Mapping[str, Span] | None = None, seed: int = 0
) -> tuple[Tensor, list]:
    """Return the received rows and the bits, after a comparison with the decoded streams."""
    whole = message(x.shape[1], len(x), spans)
    result, bits = compressor(x, draws(len(x), seed), whole)
    for i, row in enumerate(x):
        one = whole.of(i, i + 1)
        stream = compressor.encode(row, RowRandom(draws(len(x), seed).keys[i : i + 1]), one)
        assert (len(stream) * 8 - bits[i]) in range(8)
        same_numbers(compressor.decode(stream, one), result[i])
    return result, bits.tolist()


def same_numbers(a: Tensor, b: Tensor) -> None:
    """Bit for bit, but for which NaN it is."""
    assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
    words = [t.nan_to_num(nan=0.5, posinf=torch.inf, neginf=-torch.inf).numpy().view(np.uint32) for t in (a, b)]
    assert np.array_equal(*words) and torch.equal(a.isnan(), b.isnan())
