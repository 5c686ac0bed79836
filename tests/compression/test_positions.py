"""Selection of the largest values, bits of positions, and sums with equal rounding everywhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time

from fedbench.compression import _positions as positions
from fedbench.compression import _sums as sums
from fedbench.compression._stream import Reader, Writer


@pytest.mark.parametrize(
    "share, size, m", [(0.07, 100, 7), (0.01, 1, 1), (0.01, 150, 2), (1.0, 5, 5), (0.999, 3, 3), (1e-9, 7, 1)]
)
def test_a_share_is_rounded_up(share: float, size: int, m: int) -> None:
    assert positions.num_selected(share, size) == m


def test_of_equal_ones_the_first_are_the_largest() -> None:
    x = torch.tensor([[1.0, 3, 1, 3, 2, 1], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    assert positions.largest(x, 4).tolist() == [[0, 1, 3, 4], [0, 1, 2, 3], [2, 3, 4, 5]]


def test_the_width_of_the_gaps_code_is_the_best_one() -> None:
    """Golomb: the divisor is about -1 / log2(1 - p), here the power of 2 nearby that is best."""
    assert positions.rice_width(1, 1) == 0
    for m, n in [(1, 100), (10, 1000), (10, 10_000), (300, 1000), (999, 1000)]:
        ideal = math.log2(max(1, -math.log(2) / math.log(1 - m / n)))
        assert abs(positions.rice_width(m, n) - ideal) <= 1
    entropy = 10_000 * -(0.01 * math.log2(0.01) + 0.99 * math.log2(0.99))
    where = torch.rand(20, 10_000, generator=torch.Generator().manual_seed(0)).topk(100).indices.sort().values
    assert 0.98 < float(positions.count(where, 10_000).double().mean()) / entropy < 1.05


def test_the_shorter_code_is_taken() -> None:
    """8 gaps of one in 16 take 8 + 16 bits as 1, 3, ...; a map takes 16, and one bit says so."""
    odd = torch.arange(1, 16, 2)[None]
    assert positions.count(odd, 16).tolist() == [17]
    first = torch.tensor([[0, 1]])  # of 100: gaps of 0, in 6 bits each by the width 5
    assert positions.rice_width(2, 100) == 5 and positions.count(first, 100).tolist() == [1 + 2 * 6]


@the_same_every_time
@given(st.data())
def test_positions_are_read_as_they_were_written(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    where = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n)))
    out = Writer()
    positions.write(torch.tensor(where), n, out)
    assert positions.read(Reader(out.stream()), len(where), n).tolist() == [where]
    assert len(out.stream()) == -(-int(positions.count(torch.tensor([where]), n)) // 8)


@the_same_every_time
@given(st.integers(1, 300), st.integers(0, 1000))
def test_sums_do_not_depend_on_other_rows(size: int, seed: int) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(sums.total(x)[1:2], sums.total(x[1:2]))
    assert torch.allclose(sums.total(x.double()), x.double().sum(1), atol=1e-12)
    assert torch.equal(sums.total(x.T, 0), sums.total(x))
    assert (sums.l2_norm(x) >= x.abs().amax(1, keepdim=True)).all()


def test_means_and_norms_are_rounded_once() -> None:
    x = torch.rand(50, 9999, generator=torch.Generator().manual_seed(0))
    exact = x.double()
    assert torch.equal(sums.mean_magnitude(x)[:, 0], (exact.sum(1) / 9999).float())
    assert torch.equal(sums.l2_norm(x)[:, 0], exact.square().sum(1).sqrt().float())


def test_shares_of_nothing_are_nothing() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -4.0]])
    assert sums.over(x, x.abs().amax(1, keepdim=True)).tolist() == [[0, 0], [0.25, 1]]
