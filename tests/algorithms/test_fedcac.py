"""FedCAC: critical parameters and overlaps by hand, and its limits."""

import numpy as np
import torch
from by_hand import COHORTS, six_clients, squares
from tiny import close, deployed, equal, play

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedcac import FedCAC
from fedbench.algorithms.local import Local


def test_critical_parameters_by_hand() -> None:
    a = FedCAC(tau=0.5)
    a.spans = [(0, 4), (4, 7)]  # 2 of 4 and 1 of 3
    s = torch.tensor([[0.1, -0.4, 0.3, 0.2, 0.0, 0.5, -0.6, 9.0], [1.0, 1.0, 1.0, 0.0, 0.0, 1e-15, 2e-15, 9.0]])
    found = a.critical(s).int().tolist()
    assert found[0] == [0, 1, 1, 0, 0, 0, 1, 0]  # the last one is a running statistic
    assert found[1] == [1, 1, 1, 0, 0, 1, 1, 0]  # ties; and a threshold below 1e-10


def test_similar_clients_by_hand() -> None:
    """O_01 = 1/2, O_02 = 0, O_12 = 1/2: mean 1/3, maximum 1/2, so the threshold passes 1/2 after round beta."""
    m = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    near, alone = [[True, True, False], [True, True, True], [False, True, True]], torch.eye(3).bool().tolist()
    a = FedCAC(beta=4.0)
    assert [a.similar(m, t).tolist() for t in (1, 4, 5)] == [near, near, alone]
    assert a.similar(m[:1], 1).tolist() == [[True]]
    assert a.similar(m[:1].expand(3, -1), 4).all()  # equal masks overlap wholly


def test_fedcac_without_critical_parameters_is_fedavg() -> None:
    e, other = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, FedCAC(tau=0.0), 3, COHORTS), play(other, FedAvg(), 3, COHORTS)
    equal(a.w, b.w)
    equal(deployed(e, a), b.w.expand(6, -1))


def test_fedcac_of_critical_parameters_alone_is_local() -> None:
    """With tau = 1 every parameter that a client has moved is its own; in least squares, all are."""
    e, other = squares(steps=2), squares(steps=2)
    a, b = play(e, FedCAC(tau=1.0, beta=0.5), 3), play(other, Local(), 3)
    close(deployed(e, a), deployed(other, b), 1e-6)


def test_unsampled_clients_keep_their_critical_parameters() -> None:
    e = six_clients(epochs=2)
    a = play(e, FedCAC(), 1)
    c, m = a.c.whole(), a.m.whole()
    play(e, a, 1, [[0, 1]], begin=1)
    others = np.array([2, 3, 4, 5])
    rows = deployed(e, a)[others]
    equal(rows[m[others]], c[others][m[others]])
    equal(rows[~m[others]], a.w.expand(4, -1)[~m[others]])


def test_fedcac_with_overlap_averages_critical_parameters_by_hand() -> None:
    """Two clients: each is the other's most similar one, so c is the plain mean in the rounds up to beta."""
    e = six_clients(epochs=1)
    a = play(e, FedCAC(beta=1.0), 1, [[1, 4]])
    both = a.c[np.array([1, 4])]
    equal(both[0], both[1])
    play(e, a, 1, [[1, 4]], begin=1)
    both = a.c[np.array([1, 4])]
    assert (both[0] != both[1]).any()
