"""Exact PGFed: a step by hand, its limits, and PGFed's distance to it."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, OnlyHead, points, row, six_clients
from tiny import (
    all_clients,
    close,
    deployed,
    engine,
    equal,
    play,
    ragged,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_exact import PGFedExact
from fedbench.core.options import ConfigError
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD


def test_pgfed_exact_by_hand() -> None:
    """Means of targets (1, 3, 8), w = 2, mu 0.4, lr 0.1: client 0's gradient is 1 + 0.4 ((2 - 3) + (2 - 8)) / 2
    = -0.4, client 1's -1 + 0.2 (1 - 6) = -2, client 2's -6 + 0.2 (1 - 1) = -6."""
    e = points([[1], [2, 4], [8, 7, 9]], lr=0.1, start=2.0)
    a = play(e, PGFedExact(mu=0.4))
    close(deployed(e, a)[:, 0], row(2.04, 2.2, 2.6))
    close(a.w, row((2.04 + 2 * 2.2 + 3 * 2.6) / 6))
    e = points([[1], [2, 4], [8, 7, 9]], lr=0.1, start=2.0)  # the risks of those not sampled count as well
    close(deployed(e, play(e, PGFedExact(mu=0.4), 1, [[0, 2]]))[:, 0], row(2.04, 2.0, 2.6))


def test_pgfed_exact_without_weight_is_fedavg_local() -> None:
    e, other = six_clients(), six_clients()
    a, b = play(e, PGFedExact(mu=0.0), 3, COHORTS), play(other, FedAvg("local"), 3, COHORTS)
    equal(deployed(e, a), deployed(other, b))
    equal(a.w, b.w)


def test_pgfed_estimates_the_exact_step() -> None:
    """PGFed knows f_j to first order around theta_j.  With a_ij = 1 / (N - 1), a_ii = 0, one step from w differs from
    the exact one by lr mu mean(g_j(theta_j) - g_j(w)): nothing at theta_j = w, and in proportion to the distance."""
    mu, n = 0.5, 6

    def fresh() -> Engine:  # smooth: no ReLU between w and theta_j
        return engine(*ragged(), OnlyHead(16, 3), SGD(lr=0.1), batch_size=100)

    e = fresh()
    w = e.model.init_row()
    exact = play(e, PGFedExact(mu)).theta[np.arange(n)]
    noise = torch.linspace(-1, 1, n * len(w)).view(n, -1).sin()
    gaps = []
    for size in (0.0, 0.01, 0.1):
        other = fresh()
        a = play(other, PGFed(mu=mu, eta2=0.0), rounds=0)
        a.G, _ = all_clients(other).gradient(w + size * noise)
        a.c, a.gbar, a.prev = torch.zeros(n), torch.zeros_like(w), torch.arange(n)
        a.A[np.arange(n)] = (1 - torch.eye(n)) / (n - 1)
        play(other, a, begin=1)
        gaps.append(float((a.theta[np.arange(n)] - exact).norm()))
    assert gaps[0] < 1e-6 and 9 < gaps[2] / gaps[1] < 11


def test_pgfed_exact_is_for_small_federations() -> None:
    e = six_clients()
    e.federation.num_samples = e.federation.num_samples * 1000
    with pytest.raises(ConfigError, match="for small federations"):
        play(e, PGFedExact())
