"""Sparse ternary compression by hand, both variants."""

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression.stc import STC, quantile


def test_the_largest_are_sent_as_their_mean_magnitude() -> None:
    """2 of 6: -4 and 3, mean 3.5.  32 bits, 2 signs, and positions."""
    result, bits = seen(STC(share=0.3), rows([1, -4, 0.5, 3, -1, 2]))
    assert torch.equal(result, rows([0, -3.5, 0, 3.5, 0, 0]))
    assert bits[0] >= 32 + 2 + 2


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    """2 of 4, and three of magnitude 2, of either sign: the first two."""
    assert torch.equal(seen(STC(share=0.5), rows([1, -2, 2, -2]))[0], rows([0, -2, 2, 0]))


def test_all_of_one_magnitude_is_exact_at_share_one() -> None:
    x = rows([2, -2, -2, 2])
    assert torch.equal(seen(STC(share=1.0), x)[0], x)


def test_it_is_as_large_as_the_row() -> None:
    """STC(c x) = c STC(x) for c = 4, a power of two."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(seen(STC(0.05), 4 * x)[0], 4 * seen(STC(0.05), x)[0])


def test_a_hundredth_of_the_default_model() -> None:
    """4,810 numbers, 49 of which are kept: golomb's positions take 5 + 1 / (1 - 0.99^32) bits or so each."""
    x = torch.randn(20, 4810, generator=torch.Generator().manual_seed(0))
    result, bits = STC(0.01)(x, draws(20), message(4810, 20))
    assert ((result != 0).sum(1) == 49).all()
    assert 420 < bits.float().mean() < 500  # against 153,920


def test_what_was_sent_and_the_memory_is_what_was_due_over_twenty_rounds() -> None:
    g, compressor = torch.Generator().manual_seed(0), STC(0.02)
    memory, sent, due = torch.zeros(2, 500), torch.zeros(2, 500), torch.zeros(2, 500)
    for _ in range(20):
        x = torch.randn(2, 500, generator=g)
        out, _ = compressor(memory + x, draws(2), message(500, 2))
        memory, sent, due = memory + x - out, sent + out, due + x
    torch.testing.assert_close(sent + memory, due, rtol=0, atol=1e-4)
    assert float(memory.norm()) < float(due.norm()) * 10


def test_pfednets_variant_keeps_a_share_of_either_sign() -> None:
    """10 numbers, share 0.2: rank 0.8 * 9 = 7.2 of max(x, 0) = (0 x 6, 1, 2, 3, 5) is 2.2: 3 and 5 are kept, mean 4; of
    the magnitudes of negative ones (0 x 6, 1, 2, 4, 6) it is 2.4: 4 and 6, mean 5."""
    x = rows([1, -1, 2, -2, 3, -4, 5, -6, 0, 0])
    result, bits = seen(STC(0.2, variant="pfednet", error_feedback=False), x)
    assert torch.equal(result, rows([0, 0, 0, 0, 4, -5, 4, -5, 0, 0]))
    assert bits == [64 + 10 + 4]


@pytest.mark.parametrize("size, share", [(1, 0.5), (2, 0.2), (11, 0.1), (1000, 0.2), (1001, 0.2), (4810, 0.07)])
def test_pfednets_quantile_is_torchs(size: int, share: float) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(quantile(x, 1 - share), torch.quantile(x, 1 - share, dim=1, keepdim=True))
    trits = STC(share, variant="pfednet").compress(x, draws(3), message(size, 3)).codes["trit"]
    for sign in (1, -1):
        part = (sign * x).clamp_min(0)
        kept = (part > 0) & (part >= torch.quantile(part.double(), 1 - share, dim=1, keepdim=True))
        assert torch.equal(trits == sign, kept)


def test_pfednets_variant_keeps_200_of_1000_of_a_sign() -> None:
    """Ranks 0 to 999: 0.8 * 999 = 799.2 lies between the 800th and the 801st number, so that 200 are kept."""
    x = torch.arange(1.0, 1001)[None]
    assert int((seen(STC(0.2, variant="pfednet"), x)[0] != 0).sum()) == 200


def test_pfednets_variant_makes_nothing_of_zeros() -> None:
    """One positive number among ten: the quantile is 0, and zeros stay."""
    result, _ = seen(STC(0.2, variant="pfednet", error_feedback=False), rows([7, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert torch.equal(result, rows([7, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
