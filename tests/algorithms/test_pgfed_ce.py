"""PGFed-CE: rounds by hand in each mode, and its limits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, again, column, points, row, six_clients
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_ce import PGFedCE
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD, Adam

MODES = ("server_alpha", "drop_mean", "pseudo_gradient")


@pytest.mark.parametrize(
    "mode, rows, A, G",
    [
        ("server_alpha", (1.1, 2.1), ((0.5035, 0.4655), (0.5135, 0.4955)), (0.1, -0.9)),
        ("drop_mean", (1.1, 2.1), ((0.5125, 0.4525), (0.5125, 0.4525)), (0.1, -0.9)),
        ("pseudo_gradient", (1.2, 2.2), ((0.52, 0.36), (0.52, 0.36)), (0.0, -2.0)),
    ],
)
def test_pgfed_ce_by_hand(mode: Any, rows: Sequence[float], A: Sequence[Sequence[float]], G: Sequence[float]) -> None:
    """c = (1, 3), lr 0.5, mu 0.2, eta2 0.1, one step a round from w = 0, A = 1/2.

    Round 1: theta = (0.5, 1.5), w = 1.  g = (-0.5, -1.5), c_j = f_j - g_j theta_j = (0.375, 3.375).
    Round 2: aux = 0.2 x 0.5 x (-2) = -0.2; theta = 1 - 0.5 (1 - c_i - 0.2) = (1.1, 2.1), g = (0.1, -0.9).
      server_alpha: c_j + g_j theta_i = ((-0.175, 1.725), (-0.675, 0.225)), times 0.1 x 0.2 off A.
      drop_mean: s = -0.2 x 1 / (sum a = 1); mu c_j + s = (-0.125, 0.475), times 0.1 off A.
    pseudo_gradient: round 1: g = (0 - theta) / 0.5 = (-1, -3), f = (0.5, 4.5) at w = 0, c_j = (1, 9).  Round 2:
      aux = -0.4, theta = (1.2, 2.2); mu c_j + gbar w = (0.2, 1.8) - 0.4;  g = (1 - theta) / 0.5 + 0.4 = (0, -2), which
      are the gradients at w = 1.
    """
    e = points([[1], [3]])
    a = play(e, PGFedCE(0.2, 0.1, mode), 2)
    close(deployed(e, a), column(*rows))
    close(a.A[np.arange(2)], torch.tensor(A))
    close(a.G, column(*G))


def test_pgfed_ce_server_alpha_counts_local_steps() -> None:
    """One and three steps:  a_ij = 1/2 - eta2 steps_i mu (c_j + g_j theta_i), c and g of the round before."""
    e = points([[1], [3, 3, 3]], lr=0.2, batch_size=1)
    a = play(e, PGFedCE(0.2, 0.1))
    c, g = a.c, a.G  # mu is in c
    again(e, a)
    close(a.A[np.arange(2)], 0.5 - 0.1 * column(1.0, 3.0) * (c + 0.2 * deployed(e, a) @ g.T))


def test_pgfed_ce_pseudo_gradient_over_epochs() -> None:
    """c = 1, lr 0.5, momentum 0.5, three epochs of two batches (two equal samples), from 0, round 1:  v: -1, -1, -0.75,
    -0.5, -0.3125, -0.1875 ... g = -theta (1 - 0.5) / (0.5 x 6), f the mean loss of the last two steps."""
    theta, v, losses = 0.0, 0.0, []
    for _ in range(6):
        losses.append(0.5 * (theta - 1) ** 2)
        v = 0.5 * v + (theta - 1)
        theta -= 0.5 * v
    e = points([[1, 1]], momentum=0.5, epochs=3, batch_size=1)
    a = play(e, PGFedCE(mu=0.1, mode="pseudo_gradient"))
    g = -theta * 0.5 / (0.5 * 6)
    close(a.G, column(g))
    close(a.c, row(0.1 * ((losses[4] + losses[5]) / 2 - g * theta)))


@pytest.mark.parametrize("mode", MODES)
def test_pgfed_ce_without_others_is_fedavg_local(mode: Any) -> None:
    e, f = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, PGFedCE(mu=0.0, mode=mode), 3, COHORTS), play(f, FedAvg(deploy="local"), 3, COHORTS)
    equal(deployed(e, a), deployed(f, b))
    equal(a.w, b.w)
    assert not len(a.A.touched())


@pytest.mark.parametrize("mode", MODES)
def test_pgfed_ce_begins_as_fedavg_and_keeps_A_in_bounds(mode: Any) -> None:
    """A: at most alpha_max, at least 0; unchanged outside [S, S'], and altogether at eta2 = 0."""
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, PGFedCE(0.5, 2.0, mode, alpha_max=0.4), 1, COHORTS), play(f, FedAvg(), 1, COHORTS)
    equal(a.w, b.w)
    again(e, a, 1, COHORTS[1])
    A = a.A[np.arange(6)]
    assert (A >= 0).all() and (A <= 0.4).all() and (A == 0).any()
    outside = torch.ones(6, 6, dtype=torch.bool)
    outside[np.ix_(COHORTS[1], COHORTS[0])] = False
    assert (A[outside] == 1 / 6).all() and (A[~outside] != 1 / 6).all()
    g = six_clients()
    assert (play(g, PGFedCE(0.5, 0.0, mode), 3, COHORTS).A[np.arange(6)] == 1 / 6).all()


def test_pgfed_ce_without_the_mean_is_pgfed_while_A_is_even() -> None:
    """Even coefficients make the auxiliary gradient, over their sum, the mean one: rounds 1 and 2 are PGFed's."""
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, PGFedCE(0.3, 0.05, "drop_mean"), 2), play(f, PGFed(0.3, 0.05), 2)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.A[np.arange(6)], b.A[np.arange(6)], 1e-5)
    assert not torch.allclose(a.A[np.arange(6)], torch.tensor(1 / 6), atol=1e-4)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, clip=1.0)])
def test_pgfed_ce_pseudo_gradient_refuses_other_optimizers(optimizer: SGD | Adam) -> None:
    play(six_clients(optimizer), PGFedCE())
    with pytest.raises(ConfigError, match="mode=pseudo_gradient needs optimizer=sgd"):
        play(six_clients(optimizer), PGFedCE(mode="pseudo_gradient"))
