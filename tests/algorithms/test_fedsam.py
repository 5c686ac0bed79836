"""FedSAM: its limit, steps by hand, and running statistics."""

import pytest
from by_hand import COHORTS_OF_FOUR, Normed, four_of_six, points, row
from tiny import HEAD, close, engine, equal, play, ragged, seeded

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedsam import FedSAM
from fedbench.engine.optim import SGD


def test_fedsam_without_a_radius_is_fedavg_bit_for_bit() -> None:
    equal(play(four_of_six(), FedSAM(0.0), 3, COHORTS_OF_FOUR).w, play(four_of_six(), FedAvg(), 3, COHORTS_OF_FOUR).w)


def test_fedsam_by_hand() -> None:
    """f = (theta - c)^2 / 2: theta moves by -lr (theta - c + rho sign(theta - c)).
    Client 0, c = 1, from 0 at lr 0.5 and rho 0.1: 0.5 x 1.1 = 0.55; 0.55 + 0.5 (0.45 + 0.1) = 0.825.
    Client 1, c = -2: -0.5 x 2.1 = -1.05; -1.05 - 0.5 (0.95 + 0.1) = -1.575."""
    e = points([[1.0], [-2.0]], lr=0.5, epochs=2)
    close(play(e, FedSAM(0.1)).w, row((0.825 - 1.575) / 2))


def test_fedsam_divides_by_the_norm_of_all_columns() -> None:
    """At theta = 0 with c = (3, 4), |g| = 5 and e = -rho (0.6, 0.8)."""
    e = points([[[3.0, 4.0]]], lr=0.5, start=[0.0, 0.0])
    close(play(e, FedSAM(0.1)).w, row(0.5 * 3.06, 0.5 * 4.08))


@pytest.mark.parametrize("rho", [0.5, 5.0])
def test_fedsam_takes_running_statistics_from_the_first_pass(rho: float) -> None:
    a, b = (engine(*ragged(), seeded(Normed), SGD(lr=0.1), columns=HEAD, batch_size=100) for _ in range(2))
    statistics = a.model.trained.rest(a.model.size)
    close(statistics.take(play(a, FedSAM(rho)).w), statistics.take(play(b, FedAvg()).w), 1e-6)
