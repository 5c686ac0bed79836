"""PGFed-CE: rounds by hand, and its limits."""

import numpy as np
import torch
from by_hand import COHORTS, again, column, points, six_clients
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.pgfed_ce import PGFedCE
from fedbench.engine.optim import SGD


def test_pgfed_ce_by_hand() -> None:
    """c = (1, 3), lr 0.5, mu 0.2, eta2 0.1, one step a round from w = 0, A = 1/2.

    Round 1: theta = (0.5, 1.5), w = 1.  g = (-0.5, -1.5), c_j = f_j - g_j theta_j = (0.375, 3.375).
    Round 2: aux = 0.2 x 0.5 x (-2) = -0.2; theta = 1 - 0.5 (1 - c_i - 0.2) = (1.1, 2.1), g = (0.1, -0.9).
      c_j + g_j theta_i = ((-0.175, 1.725), (-0.675, 0.225)), times 0.1 x 0.2 off A.
    """
    e = points([[1], [3]])
    a = play(e, PGFedCE(0.2, 0.1), 2)
    close(deployed(e, a), column(1.1, 2.1))
    close(a.A[np.arange(2)], torch.tensor(((0.5035, 0.4655), (0.5135, 0.4955))))
    close(a.G, column(0.1, -0.9))


def test_pgfed_ce_counts_local_steps() -> None:
    """One and three steps:  a_ij = 1/2 - eta2 steps_i mu (c_j + g_j theta_i), c and g of the round before."""
    e = points([[1], [3, 3, 3]], lr=0.2, batch_size=1)
    a = play(e, PGFedCE(0.2, 0.1))
    c, g = a.c, a.G  # mu is in c
    again(e, a)
    close(a.A[np.arange(2)], 0.5 - 0.1 * column(1.0, 3.0) * (c + 0.2 * deployed(e, a) @ g.T))


def test_pgfed_ce_without_others_is_fedavg_local() -> None:
    e, f = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a, b = play(e, PGFedCE(mu=0.0), 3, COHORTS), play(f, FedAvg(deploy="local"), 3, COHORTS)
    equal(deployed(e, a), deployed(f, b))
    equal(a.w, b.w)
    assert not len(a.A.touched())


def test_pgfed_ce_begins_as_fedavg_and_keeps_A_in_bounds() -> None:
    """A: at most alpha_max, at least 0; unchanged outside [S, S'], and altogether at eta2 = 0."""
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, PGFedCE(0.5, 2.0, alpha_max=0.4), 1, COHORTS), play(f, FedAvg(), 1, COHORTS)
    equal(a.w, b.w)
    again(e, a, 1, COHORTS[1])
    A = a.A[np.arange(6)]
    assert (A >= 0).all() and (A <= 0.4).all() and (A == 0).any()
    outside = torch.ones(6, 6, dtype=torch.bool)
    outside[np.ix_(COHORTS[1], COHORTS[0])] = False
    assert (A[outside] == 1 / 6).all() and (A[~outside] != 1 / 6).all()
    g = six_clients()
    assert (play(g, PGFedCE(0.5, 0.0), 3, COHORTS).A[np.arange(6)] == 1 / 6).all()
