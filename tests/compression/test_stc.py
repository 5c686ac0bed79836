"""Sparse ternary compression by hand, both variants."""

import torch
from operators import draws, message, rows, seen

from fedbench.compression.stc import STC


def test_the_largest_are_sent_as_their_mean_magnitude() -> None:
    """2 of 6: -4 and 3, mean 3.5.  32 bits, 2 signs, and positions."""
    result, bits = seen(STC(share=0.3), rows([1, -4, 0.5, 3, -1, 2]))
    assert torch.equal(result, rows([0, -3.5, 0, 3.5, 0, 0]))
    assert bits[0] >= 32 + 2 + 2


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
    g, operator = torch.Generator().manual_seed(0), STC(0.02)
    memory, sent, due = torch.zeros(2, 500), torch.zeros(2, 500), torch.zeros(2, 500)
    for _ in range(20):
        x = torch.randn(2, 500, generator=g)
        out, _ = operator(memory + x, draws(2), message(500, 2))
        memory, sent, due = memory + x - out, sent + out, due + x
    torch.testing.assert_close(sent + memory, due, rtol=0, atol=1e-4)
    assert float(memory.norm()) < float(due.norm()) * 10


def test_pfednets_variant_keeps_a_share_of_either_sign() -> None:
    """10 numbers, share 0.2: positive ones of at least the 8th smallest of max(x, 0) = (0 x 6, 1, 2, 3, 5): 2, 3, 5,
    mean 10/3; negative ones, magnitudes (0 x 6, 1, 2, 4, 6): 2, 4 and 6, mean 4."""
    x = rows([1, -1, 2, -2, 3, -4, 5, -6, 0, 0])
    result, bits = seen(STC(0.2, variant="pfednet", memory=False), x)
    third = 10 / 3
    torch.testing.assert_close(result, rows([0, 0, third, -4, third, -4, third, -4, 0, 0]))
    assert bits == [64 + 10 + 6]


def test_pfednets_variant_makes_nothing_of_zeros() -> None:
    """One positive number among ten: the quantile is 0, and zeros stay."""
    result, _ = seen(STC(0.2, variant="pfednet", memory=False), rows([7, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert torch.equal(result, rows([7, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
