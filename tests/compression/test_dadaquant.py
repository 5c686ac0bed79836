"""DAdaQuant: levels over time and clients by hand, and unbiasedness."""

import dataclasses

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression.base import Message
from fedbench.compression.chain import Chain
from fedbench.compression.dadaquant import DAdaQuant
from fedbench.compression.topk import TopK
from fedbench.core.options import ConfigError


def told(compressor: DAdaQuant, *losses: float) -> list[float]:
    """The levels after each round."""
    levels = []
    for loss in losses:
        compressor.observe(torch.tensor([loss]))
        levels.append(float(compressor.q))
    return levels


def weighted(size: int, *shares: float) -> Message:
    w = torch.tensor(shares)
    return dataclasses.replace(message(size, len(shares)), weights=w, cohort=w)


def test_levels_double_where_the_loss_stalls_for_phi_rounds() -> None:
    """psi 0.5, phi 2: H = 8, 6, 5, 5, 5 ...: from the third round on, H_t >= H_{t-1} doubles, once levels were the same
    for two rounds."""
    compressor = DAdaQuant(1, 16, psi=0.5, phi=2)
    assert told(compressor, 8, 4, 4) == [1, 1, 1]
    assert torch.allclose(compressor.H, torch.tensor([6.0, 5.0]))
    assert told(compressor, 5) == [2]  # H = 5, as before
    assert told(compressor, 5) == [2]  # levels moved within phi rounds
    assert told(compressor, 5) == [4]
    assert told(compressor, 1, 1, 1, 1) == [4, 4, 4, 4]  # it falls


def test_psi_is_the_part_of_the_running_loss_that_stays() -> None:
    """psi 0.75 of 8 and a quarter of 4: 7, then 0.75 * 7 + 0.25 * 4 = 6.25."""
    compressor = DAdaQuant(psi=0.75, phi=2)
    told(compressor, 8, 4)
    assert torch.allclose(compressor.H, torch.tensor([8.0, 7.0]))
    told(compressor, 4)
    assert torch.allclose(compressor.H, torch.tensor([7.0, 6.25]))


@pytest.mark.parametrize("phi", [1, 2, 3])
def test_levels_double_only_after_phi_rounds_that_are_past(phi: int) -> None:
    """A constant loss, even 0, as the losses before round 1 stand there: the first to double is round phi + 1."""
    for loss in (0.0, 1.0):
        assert told(DAdaQuant(1, 2, phi=phi), *[loss] * (phi + 1)) == [1] * phi + [2]


def test_clients_have_their_levels_in_a_chain() -> None:
    shares = weighted(5, 0.7, 0.2, 0.1)
    alone = DAdaQuant(8, 64).levels_of(shares, torch.zeros(3, 5))
    sent = Chain([TopK(0.6), DAdaQuant(8, 64)]).compress(torch.ones(3, 5), draws(3), shares)
    assert torch.equal(sent.codes["1/q"], alone.int())


def test_levels_end_at_most_at_q_max_and_never_fall() -> None:
    compressor = DAdaQuant(1, 10, phi=1)
    levels = told(compressor, *[1.0] * 12)
    assert levels == sorted(levels) and levels[-1] == 8
    falling = told(DAdaQuant(2, 64, phi=3), *[1 / (r + 1) for r in range(30)])
    assert falling == [2] * 30


def test_larger_clients_have_more_levels_and_the_mean_the_same_variance() -> None:
    compressor = DAdaQuant(8, 64)
    equal = compressor.levels_of(weighted(5, 0.25, 0.25, 0.25, 0.25), torch.zeros(4, 5))
    assert equal.flatten().tolist() == [8, 8, 8, 8]
    w = torch.tensor([0.7, 0.2, 0.1])
    a, b = (w ** (2 / 3)).sum(), (w**2).sum() / 64
    expected = ((a / b).sqrt() * w ** (2 / 3)).round()
    found = compressor.levels_of(weighted(5, 0.7, 0.2, 0.1), torch.zeros(3, 5)).flatten()
    assert torch.equal(found, expected) and found[0] > 8 > found[2]
    exact = (a / b).sqrt() * w ** (2 / 3)
    torch.testing.assert_close((w**2 / exact**2).sum(), (w**2).sum() / 64)
    small = DAdaQuant(1, 64).levels_of(weighted(5, 0.98, 0.01, 0.01), torch.zeros(3, 5))
    assert small.min() == 1


def test_multiples_of_the_norm_by_hand() -> None:
    """norm 5, q = 1: (5, 0) stays; of (3, 4) each is 0 or 5.  32 bits of the norm, 1 of q; no zero, a sign and 1 take 1
    bit each, one zero at the end 3."""
    result, bits = seen(DAdaQuant(1, 4), rows([5, 0], [3, 4]))
    assert torch.equal(result[0], rows([5, 0])[0]) and bits[0] == 32 + 1 + 3 + 3
    assert set(result[1].tolist()) <= {0.0, 5.0}


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_it_is_right_on_average(norm: str) -> None:
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    many, n = x.expand(20_000, 40).contiguous(), 20_000
    result, _ = DAdaQuant(3, 16, norm=norm)(many, draws(n), message(40, n))  # type: ignore[arg-type]
    scale = float(x.norm() if norm == "l2" else x.abs().max()) / 3
    assert float((result.mean(0) - x[0]).abs().max()) < 5 * 0.5 * scale / n**0.5
    assert result.std(0).max() > 0.1 * scale


def test_it_goes_on_after_a_resume() -> None:
    one, other = DAdaQuant(phi=2), DAdaQuant(phi=2)
    told(one, 4, 3, 3)
    other.load_state_dict(one.state_dict())
    assert told(other, 3, 3, 3) == told(one, 3, 3, 3)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"q_min=9 is more than compression\.q_max=8"):
        DAdaQuant(9, 8)
