"""A scaled compressor is contractive: a received row is never farther from the row than 0 is."""

from __future__ import annotations

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression._scaled import Scaled, contractive
from fedbench.compression.base import Compressor
from fedbench.compression.chain import Chain
from fedbench.compression.qsgd import QSGD
from fedbench.compression.randk import RandK
from fedbench.compression.sign import Sign
from fedbench.compression.ternary import Ternary
from fedbench.compression.topk import TopK

NOISY: list[Compressor] = [
    RandK(0.1, unbiased=True, error_feedback=False),
    QSGD(1, "l2"),
    Ternary(),
    Ternary(clip=2.5),
    Chain([TopK(0.5), Ternary()], error_feedback=False),
]


def name(compressor: Compressor) -> str:
    return type(compressor).__name__


def test_the_nearest_multiple_is_sent() -> None:
    """By hand: of (3, 4) random-1, scaled by 2, shows (6, 0) or (0, 8); half of it is the number itself."""
    result, bits = seen(contractive(RandK(0.5, unbiased=True, error_feedback=False)), rows([3, 4], [0, 0]))
    assert sorted(result[0].tolist()) in ([0, 3], [0, 4]) and not result[1].any()
    assert bits == [32 + 64 + 32] * 2


CONTRACTIVE = [TopK(0.1), RandK(0.1), Sign(), QSGD(None), Chain([TopK(0.5), Sign()])]


@pytest.mark.parametrize("compressor", CONTRACTIVE, ids=name)
def test_what_contracts_is_sent_as_ever(compressor: Compressor) -> None:
    assert contractive(compressor) is compressor


@pytest.mark.parametrize("compressor", NOISY, ids=name)
def test_what_is_due_dies_out(compressor: Compressor) -> None:
    """d <- d - C(d), 600 times: damped it vanishes; as it is it may grow without a bound."""
    whole, damped = message(200, 3), contractive(compressor)
    assert isinstance(damped, Scaled)
    start = draws(3).normal(200)
    due = start.clone()
    for r in range(600):
        left = due - damped(due, draws(3, r), whole)[0]
        assert (left.norm(dim=1) <= due.norm(dim=1) * (1 + 1e-6)).all()
        due = left
    assert (due.norm(dim=1) < 0.05 * start.norm(dim=1)).all()


def test_undamped_noise_grows() -> None:
    """What the test above would be without it."""
    start, whole, compressor = draws(1).normal(200), message(200), QSGD(1, "l2")
    due = start
    for r in range(20):
        due = due - compressor(due, draws(1, r), whole)[0]
    assert due.norm() > 100 * start.norm()


def test_streams_and_diverged_rows() -> None:
    x = torch.stack([draws(1).normal(50)[0], torch.full((50,), torch.nan), torch.zeros(50)])
    for compressor in NOISY:
        result, bits = seen(contractive(compressor), x)
        assert result[1].isnan().all() and bits[1] == 0 and not result[2].any()
