"""Stochastic quantization by hand."""

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression.qsgd import QSGD
from fedbench.core.options import ConfigError


def test_multiples_of_the_norm_stay() -> None:
    """4 levels of max = 8: 8, -6, 2 and 0 are the levels 4, -3, 1 and 0, which none of the draws moves.

    Elias gamma of level + 1: 5, 4, 2 and 1 take 5, 5, 3 and 1 bits, and three have a sign: 17, behind 32."""
    x = rows([8, -6, 2, 0])
    result, bits = seen(QSGD(4), x)
    assert torch.equal(result, x) and bits == [32 + 17]
    result, bits = seen(QSGD(4, code="fixed"), x)
    assert torch.equal(result, x) and bits == [32 + 4 * 4]  # 9 signed levels take 4 bits
    result, bits = seen(QSGD(4, code="runs"), x)
    assert torch.equal(result, x) and bits == [32 + (1 + 1 + 6) + (1 + 1 + 3) + (1 + 1 + 1) + 3]  # the last: one zero


def test_the_l2_norm_is_what_the_last_level_stands_for() -> None:
    """|(3, 4)| = 5: of 5 levels 3 and 4."""
    x = rows([3, -4], [0, 0])
    result, bits = seen(QSGD(5, norm="l2"), x)
    assert torch.equal(result, x) and bits == [32 + 5 + 1 + 5 + 1, 32 + 2]


def test_others_are_rounded_to_their_neighbours_by_their_distance() -> None:
    """1 of max = 3 by 2 levels is 2/3 of a level: 1.5 in 2/3 of 20,000 draws, else 0 (standard deviation 67)."""
    x = rows([3, 1]).expand(20_000, 2).contiguous()
    result, _ = QSGD(2)(x, draws(20_000), message(2, 20_000))
    assert set(result[:, 1].tolist()) == {0.0, 1.5} and (result[:, 0] == 3).all()
    assert abs(int((result[:, 1] == 1.5).sum()) - 13_333) < 5 * 67


def test_no_level_is_above_the_last() -> None:
    """In a row whose norm is rounded, too."""
    x = torch.rand(200, 7, generator=torch.Generator().manual_seed(0))
    for norm in ("l2", "max"):
        levels = QSGD(65536, norm=norm).compress(x, draws(200), message(7, 200)).codes["level"]  # type: ignore[arg-type]
        assert levels.max() <= 65536


def test_full_precision_is_exact() -> None:
    x = rows([0.1, 0.2])
    compressor = QSGD(None)
    assert compressor.exact and torch.equal(seen(compressor, x)[0], x)


def test_too_many_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compression\.levels=.* must be at most 65,536"):
        QSGD(65537)
