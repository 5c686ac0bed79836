"""Low rank by hand, and against a singular value decomposition."""

import numpy as np
import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression.base import LIMIT
from fedbench.compression.lowrank import LowRank
from fedbench.core.rows import RowStore

SPANS = {"weight": (0, 12, (3, 4)), "bias": (12, 15, (3,))}


def test_a_matrix_of_that_rank_is_seen_as_it_is() -> None:
    """[1, 2, 3]' [1, 0, -1, 2] by one column of each side: 3 + 4 numbers and a bias of 3."""
    outer = torch.outer(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 0, -1, 2])).flatten()
    x = torch.cat([outer, torch.tensor([7.0, 8, 9])])[None]
    result, bits = seen(LowRank(1), x, SPANS)
    assert torch.allclose(result, x, atol=1e-5) and bits == [32 * 10]
    assert torch.equal(result[:, 12:], x[:, 12:])


def test_what_factors_would_not_shorten_is_sent_as_it_is() -> None:
    """2 (3 + 4) = 14 numbers are more than 12."""
    x = torch.arange(15.0)[None]
    result, bits = seen(LowRank(2), x, SPANS)
    assert torch.equal(result, x) and bits == [32 * 15]
    assert seen(LowRank(1), x)[1] == [32 * 15]  # nothing is known of its shapes


def test_a_convolution_is_a_matrix_of_its_outputs() -> None:
    x = torch.randn(2, 4 * 3 * 2 * 2, generator=torch.Generator().manual_seed(0))
    _, bits = seen(LowRank(1), x, {"conv": (0, 48, (4, 3, 2, 2))})
    assert bits == [32 * (4 + 12)] * 2


def test_what_is_seen_is_a_projection() -> None:
    """P has orthonormal columns and Q = M' P: what is lacking is orthogonal to what is seen."""
    x = torch.randn(5, 600, generator=torch.Generator().manual_seed(1))
    result, _ = seen(LowRank(3), x, {"w": (0, 600, (20, 30))})
    seen_, lacking = result.view(5, 20, 30), (x - result).view(5, 20, 30)
    assert (seen_.transpose(1, 2) @ lacking).abs().max() < 1e-4
    assert torch.linalg.matrix_rank(seen_, rtol=1e-4).tolist() == [3] * 5
    best = torch.linalg.svdvals(x.view(5, 20, 30))[:, :3].square().sum(1)
    assert (result.square().sum(1) > 0.5 * best).all() and (result.square().sum(1) <= best * (1 + 1e-5)).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e28])
def test_columns_that_depend_on_others_are_left_out(scale: float) -> None:
    """A matrix of rank 1 by three columns: rounding must not add directions of its own."""
    x = scale * torch.outer(torch.arange(1.0, 21), torch.linspace(-1, 1, 30)).flatten()[None]
    result, _ = seen(LowRank(3), x, {"w": (0, 600, (20, 30))})
    assert (result - x).double().norm() <= 1e-5 * x.double().norm()


def test_rounding_within_the_span_of_others_is_left_out() -> None:
    """Two rows of one direction: what is left of the second column may lie along the first, which would count twice."""
    g = torch.Generator().manual_seed(0)
    x = torch.zeros(2000, 20, 30)
    x[:, :2] = torch.randn(2000, 2, 1, generator=g) * torch.randn(2000, 1, 30, generator=g)
    result, _ = LowRank(3)(x.flatten(1), draws(2000), message(600, 2000, {"w": (0, 600, (20, 30))}))
    assert ((result - x.flatten(1)).norm(dim=1) <= 1e-4 * x.flatten(1).norm(dim=1)).all()


def test_a_warm_start_comes_near_to_the_best_factors() -> None:
    """Power iteration on one matrix, message after message: the best of rank 2 in the end, from whichever start."""
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(2))
    spans = {"w": (0, 600, (20, 30))}
    compressor, sent = LowRank(2, warm_start=True), message(600, 3, spans)
    compressor.setup(RowStore(3, torch.device("cpu"), 1 << 20, 1 << 20), sent)
    for r in range(300):
        result, _ = compressor(x, draws(3, r), sent)
    u, s, v = torch.linalg.svd(x.view(3, 20, 30), full_matrices=False)
    best = (u[:, :, :2] * s[:, None, :2]) @ v[:, :2]
    assert torch.allclose(result.view(3, 20, 30), best, atol=0.02)
    assert (compressor(x, draws(3), message(600, 3, spans))[0] - result).abs().max() < 0.01  # draws no longer count
    unknown = LowRank(2, warm_start=True)(x, draws(3, 1), sent)[0]  # nobody has set it up: it starts cold
    assert torch.equal(unknown, LowRank(2)(x, draws(3, 1), sent)[0])


def test_a_warm_start_is_each_client_s_own() -> None:
    spans = {"w": (0, 12, (3, 4))}
    store = RowStore(4, torch.device("cpu"), 1 << 20, 1 << 20)
    compressor, everybody = LowRank(1, warm_start=True), message(12, 4, spans)
    compressor.setup(store, everybody)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
    compressor(x[[2, 0]], draws(2), type(everybody)("theta", 12, np.array([2, 0]), spans))
    assert store.all["compression/theta"].touched().tolist() == [0, 2]


def test_zeros_and_large_numbers() -> None:
    x = torch.cat([torch.zeros(1, 12), torch.full((1, 12), 0.99 * LIMIT)])
    result, _ = seen(LowRank(1), x, {"w": (0, 12, (3, 4))})
    assert not result[0].any() and torch.isfinite(result).all()
    assert seen(LowRank(1), rows([0, 0]))[0].tolist() == [[0, 0]]
