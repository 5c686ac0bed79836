"""FedNova: its limits, the closed forms of a_i, and steps by hand."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, Normed, four_of_six
from tiny import Affine, Point, close, engine, engine_on, equal, play, ragged, seeded, targets_federation

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fednova import FedNova
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD, Adam


def nova(rho: float = 0.0, **options: float) -> FedNova:
    algorithm = FedNova(**options)
    algorithm.check_settings(None, [], SGD(0.1, rho))
    return algorithm


def test_equal_numbers_of_steps_are_fedavg() -> None:
    one, other = four_of_six(SGD(0.1), batch_size=1000), four_of_six(SGD(0.1), batch_size=1000)
    close(play(one, FedNova(), 3, COHORTS_OF_FOUR).w, play(other, FedAvg(), 3, COHORTS_OF_FOUR).w, 1e-6)


def test_unequal_numbers_of_steps_are_not() -> None:
    one, other = four_of_six(SGD(0.1), batch_size=3), four_of_six(SGD(0.1), batch_size=3)
    a, b = play(one, FedNova(), 3, COHORTS_OF_FOUR).w, play(other, FedAvg(), 3, COHORTS_OF_FOUR).w
    assert float((a - b).abs().max()) > 1e-4


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_a_of_momentum_is_its_closed_form(rho: float) -> None:
    """[T - rho (1 - rho^T) / (1 - rho)] / (1 - rho)."""
    T = torch.tensor([1.0, 4.0, 9.0, 0.0])
    close(nova(rho).accumulation(T, 0.1), (T - rho * (1 - rho**T) / (1 - rho)) / (1 - rho))


def test_a_of_the_proximal_term_is_its_closed_form() -> None:
    """(1 - (1 - eta mu)^T) / (eta mu)."""
    T, eta, mu = torch.tensor([1.0, 4.0, 9.0]), 0.1, 0.5
    close(nova(mu=mu).accumulation(T, eta), (1 - (1 - eta * mu) ** T) / (eta * mu))


def test_with_constant_gradients_every_client_counts_by_its_gradient() -> None:
    """Losses theta . y: the normalized update is the mean gradient, whatever the numbers of steps.

    Client 0 has 2 samples and takes 2 steps of gradient 1; client 1 has 6 and takes 6 steps of gradient -1, at batch
    size 1 and lr 0.1.  p = 1/4, 3/4 and tau_eff = 2/4 + 18/4 = 5.  G = 5 * 0.1 * (1/4 - 3/4) = -0.25.
    """
    targets = [np.full((2, 1), 1.0), np.full((6, 1), -1.0)]
    e = engine_on(targets_federation(targets, Affine()), Point([2.0]), SGD(0.1), batch_size=1)
    close(play(e, FedNova(), 1).w, torch.tensor([2.25]))


def test_running_statistics_are_averaged_plainly() -> None:
    """After one round of unequal steps, they are those of FedAvg, and the parameters are not."""
    rows = []
    for method in (FedNova(), FedAvg()):
        arrays, split = ragged()
        e = engine(arrays, split, seeded(Normed), SGD(0.1), batch_size=4, drop_last=True)
        rows.append(play(e, method, 1).w)
    p = e.model.trained.size
    equal(rows[0][p:], rows[1][p:])
    assert float((rows[0] - rows[1]).abs().max()) > 1e-4


def test_clients_without_a_change_leave_w() -> None:
    e = four_of_six(SGD(lr=1e-30))
    equal(play(e, FedNova(), 2, COHORTS_OF_FOUR).w, e.model.init_row())


@pytest.mark.parametrize(
    "optimizer, match",
    [
        (Adam(0.1), "optimizer=sgd"),
        (SGD(0.1, 0.9, nesterov=True), "nesterov=false"),
        (SGD(0.1, weight_decay=0.1), "weight_decay=0"),
        (SGD(0.1, 0.9, reset="never"), "optimizer.reset=round"),
    ],
)
def test_other_optimizers_are_refused(optimizer: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FedNova().check_settings(None, [], optimizer)  # type: ignore[arg-type]


def test_server_momentum_needs_one_rate() -> None:
    with pytest.raises(ConfigError, match=r"one optimizer\.lr for all clients"):
        FedNova(server_momentum=0.5).check_settings(2, [], SGD([0.1, 0.2]))
