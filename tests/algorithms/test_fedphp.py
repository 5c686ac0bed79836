"""FedPHP: its average by hand, its limits, and the discrepancy."""

import numpy as np
import torch
from by_hand import COHORTS, again, six_clients
from tiny import close, deployed, equal, play

from fedbench.algorithms._features import BANDWIDTHS, mmd
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedphp import FedPHP


def test_fedphp_without_discrepancy_trains_as_fedavg_and_averages_by_hand() -> None:
    """m = mu t / (rounds - 1) = 0.2 t, in 4 rounds with mu = 0.6.  Client 0 takes part in rounds 0, 2 and 3."""
    e, f = six_clients(), six_clients()
    a, b = play(e, FedPHP(mu=0.6, lam=0.0), rounds=0), play(f, FedAvg("local"), rounds=0)
    average = e.model.init_row()
    for t, ids in enumerate([*COHORTS, [0, 1]]):
        again(e, a, t, ids), again(f, b, t, ids)
        if 0 in ids:
            average = (1 - 0.2 * t) * b.theta[np.array([0])][0] + 0.2 * t * average
    equal(a.w, b.w)
    close(deployed(e, a)[0], average, 1e-6)


def test_fedphp_without_memory_deploys_models_as_trained() -> None:
    e, f = six_clients(), six_clients()
    a, b = play(e, FedPHP(mu=0.0, lam=0.0), 3, COHORTS), play(f, FedAvg("local"), 3, COHORTS)
    close(deployed(e, a), deployed(f, b), 1e-6)


def test_fedphp_with_the_discrepancy_alone_does_not_move_from_the_average() -> None:
    """lam = 1: at theta = theta_p the discrepancy and its gradient are 0."""
    e = six_clients()
    close(play(e, FedPHP(lam=1.0)).w, e.model.init_row(), 1e-6)


def test_discrepancy_by_hand() -> None:
    """Two samples: (k(0, 0) + k(1, 1) + 2 k(0, 1)) / 4 of either set, less twice the mean over pairs of both."""

    def k(d: float) -> float:
        return sum(np.exp(-(d**2) / (2 * h)) for h in BANDWIDTHS)

    a, b = torch.tensor([[[0.0], [2.0]]]), torch.tensor([[[1.0], [5.0]]])
    want = (2 * k(0) + 2 * k(2)) / 4 + (2 * k(0) + 2 * k(4)) / 4 - 2 * (k(1) + k(5) + k(1) + k(3)) / 4
    close(mmd(a, b, torch.full((1, 2), 0.5)), torch.tensor([want]).float())
    close(mmd(a, a, torch.full((1, 2), 0.5)), torch.zeros(1))


def test_discrepancy_leaves_out_padding() -> None:
    a, b = torch.randn(2, 1, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    weight = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    close(mmd(a, b, weight), mmd(a[:, :2], b[:, :2], weight[:, :2]))
