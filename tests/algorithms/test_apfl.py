"""APFL: steps by hand, and its limits in alpha."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, Normed, points, row, six_clients
from tiny import (
    HEAD,
    close,
    deployed,
    engine,
    equal,
    mlp,
    play,
    ragged,
    seeded,
)

from fedbench.algorithms.apfl import APFL
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.local import Local
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD


def mixture_by_hand(c: float, v: float, a: float, lr: float, steps: int, adaptive: bool) -> tuple[float, float, float]:
    """w, v, a after the steps of a round from w = 0."""
    w = 0.0
    for t in range(steps):
        g = a * v + (1 - a) * w - c
        slope = (v - w) * g
        w, v = w - lr * (w - c), v - lr * a * g
        if adaptive and t == 0:
            a = min(max(a - lr * slope, 0), 1)
    return w, v, a


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_by_hand(adaptive: bool) -> None:
    """c = (1, 3), v = (2, -1), a = 0.25, lr 0.5.  First step:  vbar = (0.5, -0.25), grad = (-0.5, -3.25),
    v = (2.0625, -0.59375), w = (0.5, 1.5);  adaptive: slope (-1, 3.25), a = (0.75, -1.375 cut to 0).
    Two steps as in mixture_by_hand; a moves at the first one only.
    """
    assert mixture_by_hand(1, 2, 0.25, 0.5, 1, True) == (0.5, 2.0625, 0.75)
    assert mixture_by_hand(3, -1, 0.25, 0.5, 1, True) == (1.5, -0.59375, 0)
    for epochs in (1, 2):
        e = points([[1], [3]], lr=0.5, epochs=epochs)
        m = play(e, APFL(0.25, adaptive), rounds=0)
        m.v[np.arange(2)] = torch.tensor([[2.0], [-1.0]])
        play(e, m, begin=1)
        w, v, a = torch.tensor([mixture_by_hand(c, v, 0.25, 0.5, epochs, adaptive) for c, v in ((1, 2), (3, -1))]).T
        close(m.v[np.arange(2)][:, 0], v)
        close(m.a[np.arange(2)][:, 0], a)
        close(m.w, w.mean(0, keepdim=True))
        close(deployed(e, m)[:, 0], a * v + (1 - a) * w.mean())  # with the aggregated w


def test_apfls_share_ends_at_one() -> None:
    """w = 0, a = 0.5, lr 0.5.  c = 1, v = 1.5: vbar = 0.75, slope 1.5 (-0.25), a = 0.6875.  c = 9, v = 5: vbar = 2.5,
    slope 5 (-6.5), a = 16.75 cut to 1."""
    e = points([[1], [9]], lr=0.5)
    m = play(e, APFL(0.5, adaptive=True), rounds=0)
    m.v[np.arange(2)] = torch.tensor([[1.5], [5.0]])
    play(e, m, begin=1)
    close(m.a[np.arange(2)][:, 0], row(0.6875, 1.0))


def test_apfl_without_personal_share_is_fedavg() -> None:
    e, other = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, APFL(alpha=0.0), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    equal(a.w, b.w)
    equal(deployed(e, a), deployed(other, b))
    equal(a.v[np.arange(6)], e.model.init_row().expand(6, -1))


@pytest.mark.parametrize("momentum, normed", [(0.0, False), (0.9, False), (0.9, True)])
def test_apfl_all_personal_is_local_beside_fedavg(momentum: float, normed: bool) -> None:
    """Kept momentum of both rows, and BatchNorm statistics, included."""

    def fresh() -> Engine:
        return engine(
            *ragged(),
            seeded(Normed) if normed else mlp(),
            SGD(lr=0.1, momentum=momentum, reset="never"),
            columns=HEAD,
            drop_last=True,
        )

    e, f, g = fresh(), fresh(), fresh()
    a, b, c = (play(x, m, 3, COHORTS) for x, m in ((e, APFL(alpha=1.0)), (f, Local()), (g, FedAvg())))
    close(deployed(e, a), deployed(f, b), 1e-6)
    equal(a.w, c.w)
