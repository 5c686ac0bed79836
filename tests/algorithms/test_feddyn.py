"""FedDyn: rounds by hand, its state, and its fixed point."""

import numpy as np
import torch
from by_hand import COHORTS, Normed, points, row, six_clients
from tiny import (
    HEAD,
    all_clients,
    close,
    engine,
    play,
    ragged,
    seeded,
)

from fedbench.algorithms.feddyn import FedDyn
from fedbench.algorithms.fedprox import FedProx
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD


def test_feddyn_by_hand() -> None:
    """c = (1, 3), lr 0.5, alpha 0.2, two steps a round.

    Round 1, both, w = 0:  theta_0: 0.5, then 0.5 - 0.5 (-0.5 + 0.2 x 0.5) = 0.7;  theta_1 = 3 x 0.7 = 2.1.
    g = -0.2 theta = (-0.14, -0.42);  h = -0.2 (0.7 + 2.1) / 2 = -0.28;  w = 1.4 + 0.28 / 0.2 = 2.8.
    Round 2, client 0 alone:  gradient 1.8 + 0.14 = 1.94, theta = 1.83;  then 0.83 + 0.14 + 0.2 (1.83 - 2.8) = 0.776,
    theta = 1.442.  g_0 = -0.14 - 0.2 (1.442 - 2.8) = 0.1316;  h = -0.28 + 0.2 x 1.358 / 2 = -0.1442 (over all N);
    w = 1.442 + 0.1442 / 0.2 = 2.163.
    """
    e = points([[1], [3]], lr=0.5, epochs=2)
    a = play(e, FedDyn(alpha=0.2))
    close(a.g[np.arange(2)][:, 0], row(-0.14, -0.42))
    close(torch.cat([a.h, a.w]), row(-0.28, 2.8))
    play(e, a, 1, [[0]], begin=1)
    close(a.g[np.arange(2)][:, 0], row(0.1316, -0.42))
    close(torch.cat([a.h, a.w]), row(-0.1442, 2.163))


def test_feddyn_begins_as_fedprox_with_a_doubled_step() -> None:
    e, alpha = six_clients(epochs=2), 0.3
    w = e.model.init_row()
    theta = all_clients(e).train(w, extra_grad=lambda s: alpha * (s.theta - w)).theta  # FedProx(mu = alpha)
    a = play(e, FedDyn(alpha))
    close(a.g[np.arange(6)], -alpha * (theta - w))
    close(a.w, w + 2 * (theta - w).mean(0))


def test_feddyn_memories_sum_to_the_servers() -> None:
    e = six_clients()
    a = play(e, FedDyn(), 3, COHORTS)
    close(a.g[np.arange(6)].sum(0), 6 * a.h)


def test_feddyn_stays_at_the_optimum() -> None:
    """c = (1, 3): at w = 2, the minimum of f_0 + f_1, with g_i = grad f_i(2) = (1, -1) and h = 0, nothing moves."""
    e = points([[1], [3]], lr=0.4, epochs=3)
    a = play(e, FedDyn(), rounds=0)
    a.w, a.g[np.arange(2)] = row(2.0), torch.tensor([[1.0], [-1.0]])
    play(e, a, 3, begin=1)
    close(torch.cat([a.w, a.h, a.g[np.arange(2)][:, 0]]), row(2.0, 0.0, 1.0, -1.0))


def test_feddyn_averages_statistics_as_they_are() -> None:
    """Running means and variances have no gradient: neither alpha nor h moves them."""

    def fresh() -> Engine:
        return engine(*ragged((10,) * 6), seeded(Normed), SGD(lr=0.1), columns=HEAD)  # FedDyn weighs all alike

    e, f = fresh(), fresh()
    a, b = play(e, FedDyn(alpha=0.5), 1), play(f, FedProx(mu=0.5), 1)  # a client's first round is FedProx's
    statistics = e.model.trained.rest(e.model.size)
    close(statistics.take(a.w), statistics.take(b.w), 1e-6)
    assert not torch.equal(statistics.take(a.w), statistics.take(e.model.init_row()))
