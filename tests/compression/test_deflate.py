"""Deflate: lossless, and the rows on which it saves bits."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from fedbench.compression.base import Message
from fedbench.compression.cer import CER
from fedbench.compression.chain import Chain
from fedbench.compression.deflate import Deflate
from fedbench.core.rng import RowRandom

N = 4096
MESSAGE = Message("x", N, np.arange(2))


def draws() -> RowRandom:
    return RowRandom(torch.tensor([1, 2]))


def rows() -> torch.Tensor:
    """A row of noise with a negative zero, and one of four pieces."""
    noise = torch.randn(N, generator=torch.Generator().manual_seed(0))
    noise[3] = -0.0
    return torch.stack([noise, torch.arange(4.0).repeat_interleave(N // 4)])


def test_rows_arrive_bit_for_bit_in_the_bytes_that_zlib_needs() -> None:
    x, compressor = rows(), Deflate()
    seen, bits = compressor(x, draws(), MESSAGE)
    assert torch.equal(seen.view(torch.int32), x.view(torch.int32))
    for row, used in zip(x, bits.tolist()):
        size = len(zlib.compress(row.numpy().tobytes(), 6))
        assert used == 8 * size + 2 * size.bit_length() - 1
        stream = compressor.encode(row, draws(), MESSAGE)
        assert len(stream) == -(-used // 8)
        assert torch.equal(compressor.decode(stream, MESSAGE).view(torch.int32), row.view(torch.int32))
    assert bits[0] > 0.8 * 32 * N and bits[1] < 0.02 * 32 * N


def test_it_stands_behind_pieces() -> None:
    """Of a row that CER made piecewise constant, sent whole, deflate needs a fraction."""
    x = torch.randn(2, N, generator=torch.Generator().manual_seed(1)).cumsum(1)
    plain, pieces = (Chain([CER(gamma_rel=g, send="all"), Deflate()])(x, draws(), MESSAGE) for g in (1e-6, 0.3))
    assert (pieces[1] < 0.2 * plain[1]).all()
