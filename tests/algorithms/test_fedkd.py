"""FedKD: its truncation, its bytes, and its state."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, again, products, six_clients
from tiny import close, equal, play

from fedbench.algorithms.fedkd import FedKD, truncated
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel


def linear(matrix: torch.Tensor) -> tuple[FlatModel, torch.Tensor]:
    module = torch.nn.Linear(*matrix.T.shape)
    module.weight.data, module.bias.data = matrix, torch.ones(len(matrix))
    model = FlatModel(module)
    return model, model.init_row()[None]


@pytest.mark.parametrize("T, rank", [(0.5, 1), (0.85, 1), (0.95, 2), (0.999, 3), (1.0, 3)])
def test_truncation_keeps_the_first_values_whose_energy_exceeds_T(T: float, rank: int) -> None:
    """Singular values 6, 2, 1 of a 3 x 20 matrix: energies 36/41 = 0.878, 40/41 = 0.976 and 1."""
    values = torch.tensor([6.0, 2.0, 1.0])
    U, V = (torch.linalg.qr(torch.randn(n, 3, generator=torch.Generator().manual_seed(n)))[0] for n in (3, 20))
    model, row = linear((U * values) @ V.T)
    out, numbers = truncated(model, row, T)
    close(model.named(out)["weight"][0], (U * values)[:, :rank] @ V.T[:rank])
    equal(model.named(out)["bias"], model.named(row)["bias"])
    assert numbers.tolist() == [3 + min(rank * (3 + 20 + 1), 60)]


def test_truncation_keeps_matrices_that_need_all_values() -> None:
    """The released code makes them 0."""
    model, row = linear(torch.linalg.qr(torch.randn(8, 8))[0])
    close(truncated(model, row, 0.95)[0], row)
    close(truncated(model, torch.zeros_like(row), 0.95)[0], torch.zeros_like(row))


def test_bytes_are_those_of_the_factors() -> None:
    e = six_clients()
    a = play(e, FedKD(T_start=0.5, T_end=0.5), 1, COHORTS)
    sent = int(a.numbers)
    assert sent < e.model.size
    cohort = again(e, a, 1, [1, 2])
    assert cohort.cost.bytes_down == cohort.cost.dense_down * sent / e.model.size == 2 * 4 * sent
    assert cohort.cost.bytes_up < cohort.cost.dense_up == 2 * 4 * e.model.size


def test_without_truncation_the_server_averages_students_and_sends_all() -> None:
    e = six_clients()
    a = play(e, FedKD(T_start=1.0, T_end=1.0), 2, COHORTS)
    close(a.g, a.w, 1e-5)


def test_teachers_and_maps_move_in_their_rounds_only() -> None:
    e = six_clients()
    a = play(e, FedKD(), 1, COHORTS)
    before = a.theta[np.arange(6)], a.W[np.arange(6)]
    again(e, a, 1, [1, 2])
    for rows, old in zip((a.theta, a.W), before):
        assert (rows[np.arange(6)] != old).any(1).tolist() == [False, True, True, False, False, False]


def test_the_student_has_its_own_rate() -> None:
    e = six_clients()
    a = play(e, FedKD(student_lr=1e-9, T_start=1.0))
    close(a.w, e.model.init_row(), 1e-5)
    assert (a.theta[np.arange(6)] - e.model.init_row()).abs().max() > 1e-2


def test_fedkd_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="algorithm=fedkd needs one class per sample"):
        play(products([1, 2], SGD(lr=0.1)), FedKD())
