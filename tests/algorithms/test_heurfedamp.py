"""HeurFedAMP: rounds by hand, and its limits."""

import math

import numpy as np
import torch
from by_hand import COHORTS, again, column, points, six_clients
from tiny import (
    all_clients,
    close,
    deployed,
    play,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.heurfedamp import HeurFedAMP
from fedbench.algorithms.local import Local


def test_heurfedamp_by_hand() -> None:
    """w = (1, 0), (0, 2), (3, 3): cosines 0, 1/sqrt2, 1/sqrt2; sigma = sqrt2 log 3 gives weights 1 : 3.

    xi = 0.2:  u_0 = 0.2 (1, 0) + 0.8 ((0, 2) + 3 (3, 3)) / 4 = (2, 2.2);  u_1 = 0.2 (0, 2) + 0.8 ((1, 0) + 3 (3, 3))
    / 4 = (2, 2.2);  u_2 = 0.2 (3, 3) + 0.8 ((1, 0) + (0, 2)) / 2 = (1, 1.4).  One step of rate 0.5 from u, at which
    the pull is 0, towards c = 0 halves it.
    """
    e = points([[[0.0, 0.0]]] * 3, start=(0.0, 0.0))
    a = play(e, HeurFedAMP(xi=0.2, sigma=math.sqrt(2) * math.log(3)), rounds=0)
    a.w[np.arange(3)] = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    again(e, a)
    close(2 * deployed(e, a), torch.tensor([[2.0, 2.2], [2.0, 2.2], [1.0, 1.4]]))


def test_heurfedamp_alone_is_local() -> None:
    e, f = six_clients(), six_clients()
    close(
        deployed(e, play(e, HeurFedAMP(xi=1.0, lam=0.0), 3, COHORTS)), deployed(f, play(f, Local(), 3, COHORTS)), 1e-6
    )


def test_heurfedamp_flat_is_fedavg() -> None:
    """sigma 0, xi = 1/N, no attraction, all clients: what is sent in round t + 1 is FedAvg's model after round t."""
    e, f = six_clients(sizes=[9] * 6, epochs=2), six_clients(sizes=[9] * 6, epochs=2)
    a, b = play(e, HeurFedAMP(sigma=0.0, lam=0.0), 3), play(f, FedAvg(deploy="local"), 3)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.cloud(all_clients(e, 3), a.w[np.arange(6)], 1.0), b.w.expand(6, -1), 1e-6)


def test_heurfedamp_ignores_length() -> None:
    e = six_clients()
    a = play(e, HeurFedAMP(), 1)
    w, others = a.w[np.arange(6)], ~torch.eye(6, dtype=torch.bool)
    X = a.attention(a.compare(w, w), others, 1.0)
    scaled = w * column(1, 2, 0.3, 5, 1, 10)
    close(a.attention(a.compare(scaled, scaled), others, 1.0), X, 1e-4)
    close(X.sum(1), torch.full((6,), 5 / 6), 1e-5)  # and xi = 1/6 of one's own
