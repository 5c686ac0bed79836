"""FedProx: its limits in mu, and rounds by hand."""

import pytest
from by_hand import COHORTS_OF_FOUR, LR, B, P, W, descent, four_of_six, squares
from tiny import (
    close,
    equal,
    play,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedprox import FedProx
from fedbench.engine.optim import SGD


def test_fedprox_without_its_term_is_fedavg_bit_for_bit() -> None:
    a, b = four_of_six(), four_of_six()
    equal(play(a, FedProx(0.0), 4, COHORTS_OF_FOUR).w, play(b, FedAvg(), 4, COHORTS_OF_FOUR).w)
    c = four_of_six()
    close(play(c, FedProx(1e-12), 4, COHORTS_OF_FOUR).w, play(four_of_six(), FedAvg(), 4, COHORTS_OF_FOUR).w)


@pytest.mark.parametrize("mu", [0.01, 1.0, 7.0])
def test_fedprox_with_one_local_step_is_fedavg(mu: float) -> None:
    """The term is 0 at theta = w, where the only step is taken."""
    a, b = four_of_six(SGD(lr=LR), batch_size=100), four_of_six(SGD(lr=LR), batch_size=100)
    equal(play(a, FedProx(mu), 3, COHORTS_OF_FOUR).w, play(b, FedAvg(), 3, COHORTS_OF_FOUR).w)


def test_fedprox_by_hand() -> None:
    """The gradient (theta - b) + mu (theta - w) = (1 + mu) (theta - c) with c = (b + mu w) / (1 + mu): a descent to c
    at the rate lr (1 + mu)."""
    mu, e = 0.5, squares(steps=3)
    algorithm, w = play(e, FedProx(mu), 2), W
    for _ in range(2):
        w = P @ descent(w, (B + mu * w) / (1 + mu), 3, LR * (1 + mu))
    close(algorithm.w, w)


def test_fedprox_with_a_large_mu_stays_near_the_server() -> None:
    near, far = squares(steps=50), squares(steps=50)
    close(play(near, FedProx(9.0)).w, W + 0.1 * (P @ B - W))  # (b + 9 w) / 10
    close(play(far, FedAvg()).w, P @ B, 0.02)
