"""IFCA: a round by hand, clusters found, and its limits."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, OnlyHead, column, points, six_clients
from tiny import HEAD, all_clients, close, deployed, engine, equal, play, ragged

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.ifca import IFCA
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.nn.flat import FlatModel


def test_a_round_by_hand() -> None:
    """theta = (0, 10); c = (1, 3) near the first, 9, 12 twice, near the second.  Half-way to c: (0.5, 1.5), 9.5, 11;
    means by samples: 1, and (9.5 + 2 * 11) / 3 = 10.5."""
    e = points([[1], [3], [9], [12, 12]], lr=0.5)
    m = play(e, IFCA(clusters=2), rounds=0)
    m.theta = column(0.0, 10.0)
    play(e, m, begin=1)
    close(m.theta, column(1.0, 10.5))
    close(deployed(e, m), column(1.0, 1.0, 10.5, 10.5))


def test_a_model_of_nobody_stays_and_ties_go_to_the_first() -> None:
    """c = 1 is as far from 0 as from 2; nobody picks 50."""
    e = points([[1], [1]], lr=0.5)
    m = play(e, IFCA(clusters=3), rounds=0)
    m.theta = column(0.0, 2.0, 50.0)
    play(e, m, begin=1)
    close(m.theta, column(0.5, 2.0, 50.0))


def test_one_cluster_is_fedavg() -> None:
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, IFCA(clusters=1), 3, COHORTS), play(f, FedAvg(), 3, COHORTS)
    close(a.theta[0], b.w, 1e-6)


def test_the_order_of_the_models_changes_nothing_else() -> None:
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, IFCA(clusters=3), rounds=0), play(f, IFCA(clusters=3), rounds=0)
    order = torch.tensor([2, 0, 1])
    b.theta = a.theta[order].clone()
    play(e, a, 3, COHORTS, begin=1)
    play(f, b, 3, COHORTS, begin=1)
    equal(b.theta, a.theta[order])
    equal(deployed(e, a), deployed(f, b))


def test_two_populations_are_told_apart() -> None:
    g = np.random.default_rng(0)
    centres = [-4.0] * 5 + [4.0] * 5
    e = points([g.normal(c, 0.5, 8) for c in centres], lr=0.3, epochs=3)
    m = play(e, IFCA(clusters=2), rounds=0)
    m.theta = column(-0.1, 0.1)
    play(e, m, 6, begin=1)
    pick = m.nearest(all_clients(e), m.theta)
    equal(pick, torch.tensor([0] * 5 + [1] * 5))


def test_initial_models_differ() -> None:
    m = play(six_clients(), IFCA(clusters=3), rounds=0)
    assert len({tuple(row.tolist()) for row in m.theta}) == 3


def test_a_shared_body_is_fedavgs_mean_and_heads_are_their_clusters() -> None:
    e, f = six_clients(columns=HEAD), six_clients(columns=HEAD)
    m = play(e, IFCA(clusters=2, shared_body=True), rounds=0)
    body, head = e.model.without("head"), e.model.columns["head"]
    equal(body.take(m.theta[0]), body.take(m.theta[1]))
    assert not torch.equal(head.take(m.theta[0]), head.take(m.theta[1]))
    start = m.theta.clone()
    cohort = Cohort(f, np.arange(6), 1)
    pick = m.nearest(cohort, start)
    trained = cohort.train(start[pick]).theta
    play(e, m, begin=1)
    close(body.take(m.theta[0]), cohort.weights @ body.take(trained), 1e-6)
    equal(body.take(m.theta[0]), body.take(m.theta[1]))
    for k in pick.unique():
        of_k = (pick == k) * cohort.weights
        close(head.take(m.theta[k]), of_k / of_k.sum() @ head.take(trained), 1e-6)


def test_new_clients_start_from_the_model_that_suits_them() -> None:
    e = points([[1], [9]], lr=0.5)
    m = play(e, IFCA(clusters=2), rounds=0)
    m.theta = column(0.0, 10.0)
    close(m.initial_rows_for_new_clients(all_clients(e), []), column(0.0, 10.0))


def test_models_that_begin_equal_are_refused() -> None:
    """A zero initialization: every client would pick the first model for ever."""
    arrays, split = ragged()
    model = FlatModel(OnlyHead(16, 3), new_module=lambda *key: OnlyHead(16, 3))
    e = engine(arrays, split, model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.clusters=2: this model always has the same initial"):
        play(e, IFCA(clusters=2), rounds=0)
    play(e, IFCA(clusters=1), rounds=0)
