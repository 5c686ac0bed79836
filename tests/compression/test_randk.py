"""Random-k: all positions are equally likely, and only a key and the values are transmitted."""

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression.randk import RandK
from fedbench.core.options import ConfigError


def test_kept_numbers_are_as_they_were() -> None:
    x = torch.arange(1.0, 11)[None].expand(50, 10).contiguous()
    result, bits = seen(RandK(0.3), x)
    assert (result != 0).sum(1).tolist() == [3] * 50 and bits == [64 + 3 * 32] * 50
    assert torch.equal(result[result != 0], x[result != 0])


def test_every_position_is_as_likely() -> None:
    """Of 20,000 draws of 2 in 5, each position has 8,000 with a standard deviation of 69."""
    x = torch.ones(20_000, 5)
    result, _ = RandK(0.4)(x, draws(20_000), message(5, 20_000))
    assert ((result.sum(0) - 8000).abs() < 5 * 69).all()
    pairs = result.T @ result  # both of two positions: 2,000, with a standard deviation of 42
    assert ((pairs[~torch.eye(5, dtype=torch.bool)] - 2000).abs() < 5 * 42).all()


def test_unbiased_numbers_are_scaled() -> None:
    result, _ = seen(RandK(0.5, unbiased=True, error_feedback=False), rows([3, 3, 3, 3]))
    assert sorted(result[0].tolist()) == [0, 0, 6, 6]


def test_unbiased_and_memory_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"compression\.unbiased=true"):
        RandK(0.5, unbiased=True)


def test_another_key_chooses_others() -> None:
    x = torch.arange(1.0, 101)[None]
    assert not torch.equal(seen(RandK(0.1), x)[0], seen(RandK(0.1), x, seed=1)[0])
