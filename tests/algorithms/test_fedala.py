"""FedALA: its limits, and which weights move."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six
from tiny import all_clients, close, deployed, equal, play

from fedbench.algorithms.fedala import FedALA
from fedbench.algorithms.fedavg import FedAvg


@pytest.mark.parametrize("who", ["cohort", "all"])
def test_without_learning_a_it_is_fedavg(who: str) -> None:
    """A stays 1, so every client starts from w, and deploys it."""
    e = four_of_six()
    one = play(e, FedALA(eta_A=0.0, who=who), 3, COHORTS_OF_FOUR)  # type: ignore[arg-type]
    other = play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR)
    close(one.w, other.w, 1e-6)
    close(deployed(e, one), other.w.expand(6, -1), 1e-6)


def test_weights_are_fractions_and_some_move() -> None:
    e = four_of_six()
    algorithm = play(e, FedALA(), 3, COHORTS_OF_FOUR)
    A = algorithm.A.whole()
    assert bool((A >= 0).all()) and bool((A <= 1).all()) and bool((A < 1).any())


def test_clients_without_a_model_of_their_own_deploy_w() -> None:
    e = four_of_six()
    algorithm = play(e, FedALA(), 1, [[0, 1]])
    rows = deployed(e, algorithm)
    start = e.model.init_row()  # of clients 2 to 5, which were never sampled
    below = algorithm.h.rest(e.model.size)
    equal(below.take(rows[3]), below.take(algorithm.w))
    head, w = algorithm.h.take(rows[3]), algorithm.h.take(algorithm.w)
    low, high = torch.minimum(w, algorithm.h.take(start)), torch.maximum(w, algorithm.h.take(start))
    assert bool((head >= low - 1e-6).all()) and bool((head <= high + 1e-6).all())


def test_evaluation_learns_without_a_trace() -> None:
    e = four_of_six()
    algorithm = play(e, FedALA(), 2, COHORTS_OF_FOUR)
    before = algorithm.A.whole().clone(), algorithm.theta.whole().clone()
    once = algorithm.personalized(all_clients(e, 2, "evaluation"), False)
    equal(once, algorithm.personalized(all_clients(e, 2, "evaluation"), False))
    equal(algorithm.A.whole(), before[0])
    equal(algorithm.theta.whole(), before[1])


def test_with_a_at_zero_the_head_is_personal() -> None:
    e = four_of_six()
    algorithm = play(e, FedALA(eta_A=0.0), 1, [[0, 1, 2, 3]])
    algorithm.A[np.arange(6)] = torch.zeros(6, algorithm.h.size)
    rows = deployed(e, algorithm)
    equal(algorithm.h.take(rows), algorithm.h.take(algorithm.theta.whole()))


def test_a_fraction_of_the_samples_is_drawn_anew_in_each_round() -> None:
    e = four_of_six()
    parts = [all_clients(e, r).subsample("train", 0.5, "ala") for r in (0, 0, 1)]
    whole = e.federation.splits["train"]
    for part in parts:
        for client in range(6):
            assert len(part[client]) == max(len(whole[client]) // 2, 1)
            assert set(part[client]) <= set(whole[client])
    assert all(np.array_equal(parts[0][i], parts[1][i]) for i in range(6))
    assert not all(np.array_equal(parts[0][i], parts[2][i]) for i in range(6))
