"""Stochastic ternary quantization by hand."""

import torch
from compressors import draws, message, rows, seen

from fedbench.compression._stream import Writer
from fedbench.compression.ternary import Ternary


def test_extremes_and_zeros_stay() -> None:
    x = rows([2, -2, 0, 2, 0, -2], [0, 0, 0, 0, 0, 0])
    result, bits = seen(Ternary(), x)
    assert torch.equal(result, x) and bits == [32 + 2 * 8] * 2


def test_five_numbers_are_a_byte() -> None:
    """2, 0, 1, 2, 1 in base 3, the first counting most: 162 + 0 + 9 + 6 + 1 = 178; then 2, and four zeros (1): 202."""
    compressor, out, x = Ternary(), Writer(), rows([1, -1, 0, 1, 0, 1])
    compressor.write(compressor.compress(x, draws(), message(6)), out, message(6))
    assert list(out.stream())[4:] == [178, 202]


def test_others_are_drawn_by_their_share() -> None:
    """-1 of 4: -4 in a quarter of 20,000 draws (standard deviation 61)."""
    x = rows([4, -1]).expand(20_000, 2).contiguous()
    result, _ = Ternary()(x, draws(20_000), message(2, 20_000))
    assert set(result[:, 1].tolist()) == {0.0, -4.0}
    assert abs(int((result[:, 1] == -4).sum()) - 5000) < 5 * 61


def test_outliers_are_cut_at_standard_deviations() -> None:
    """Mean 1, deviations -1, -1, -1, 3: the standard deviation is sqrt(3), and 4 is cut to it."""
    result, _ = seen(Ternary(clip=1), rows([0, 0, 0, 4], [5, 5, 5, 5]))
    assert torch.allclose(result, rows([0, 0, 0, 3**0.5], [5, 5, 5, 5])) and not Ternary(clip=1).unbiased
