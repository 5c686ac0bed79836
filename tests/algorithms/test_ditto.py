"""Ditto: its limits in lam, and rounds by hand."""

from by_hand import COHORTS_OF_FOUR, LR, B, P, W, descent, four_of_six, squares
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.local import Local


def test_ditto_without_its_pull_is_local() -> None:
    a, b = four_of_six(), four_of_six()
    equal(deployed(a, play(a, Ditto(0.0), 4, COHORTS_OF_FOUR)), deployed(b, play(b, Local(), 4, COHORTS_OF_FOUR)))


def test_the_path_of_dittos_global_model_does_not_depend_on_lam() -> None:
    rows = [play(four_of_six(), Ditto(lam), 4, COHORTS_OF_FOUR).w for lam in (0.0, 1.0, 5.0)]
    equal(rows[0], rows[1])
    equal(rows[0], rows[2])
    equal(rows[0], play(four_of_six(), FedAvg(), 4, COHORTS_OF_FOUR).w)


def test_ditto_by_hand() -> None:
    """v descends to (b + lam w) / (1 + lam) at the rate lr (1 + lam), w being what was *received*; over two rounds
    w moves and v goes on from where it was."""
    lam, e = 2.0, squares(steps=2)
    algorithm, w, v = play(e, Ditto(lam), 2), W, W.expand(3, -1)
    for _ in range(2):
        v = descent(v, (B + lam * w) / (1 + lam), 2, LR * (1 + lam))
        w = P @ descent(w, B, 2)
    close(deployed(e, algorithm), v)
    close(algorithm.w, w)


def test_ditto_with_many_steps_reaches_its_minimizer() -> None:
    """(H + lam I)^-1 (H b + lam w) with H = I."""
    e = squares(steps=1)
    close(deployed(e, play(e, Ditto(3.0, personal_epochs=200))), (B + 3 * W) / 4)


def test_dittos_personal_epochs() -> None:
    e = squares(steps=1)
    algorithm = play(e, Ditto(0.0, personal_epochs=4))
    close(deployed(e, algorithm), descent(W, B, 4))
    close(algorithm.w, P @ descent(W, B, 1))
