"""FedBN and SiloBN: their limits, and which columns are personal."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six
from tiny import HEAD, all_clients, compose, deployed, engine, equal, play, ragged
from torch import nn

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedbn import FedBN
from fedbench.algorithms.silobn import SiloBN
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models.resnet import ResNet
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


def with_norm(seed: int = 0) -> Engine:
    arrays, split = ragged()
    torch.manual_seed(seed)
    return engine(
        arrays, split, NormNet(), SGD(lr=0.1), columns=HEAD, batch_size=4, epochs=2, cohort_size=2, drop_last=True
    )


@pytest.mark.parametrize("method", [FedBN, SiloBN])
def test_without_batch_norm_it_is_fedavg_bit_for_bit(method: type[FedBN], caplog: pytest.LogCaptureFixture) -> None:
    one, other = four_of_six(), four_of_six()
    a, b = play(one, method(), 3, COHORTS_OF_FOUR), play(other, FedAvg(), 3, COHORTS_OF_FOUR)
    equal(a.w, b.w)
    assert "as fedavg" in caplog.text


def test_only_the_sampled_clients_norms_move() -> None:
    """Unsampled clients keep gamma, beta and the statistics; every other column is one for all."""
    e = with_norm()
    algorithm = play(e, FedBN(), 2, [[0, 2], [2, 3]])
    rows = deployed(e, algorithm)
    norm = algorithm.personal
    assert norm.size == 4 * 8  # gamma, beta, mean, variance
    first = e.model.init_row()
    for client in (1, 4, 5):
        equal(norm.take(rows[client]), norm.take(first))
    assert not torch.equal(norm.take(rows[0]), norm.take(rows[2]))
    equal(algorithm.shared.take(rows), algorithm.w.expand(6, -1))


def test_silobn_shares_the_parameters_of_batch_norm() -> None:
    e = with_norm()
    algorithm = play(e, SiloBN(), 1, [[0, 2]])
    assert algorithm.personal.size == 2 * 8  # mean, variance
    rows = deployed(e, algorithm)
    equal(rows[0, : e.model.trained.size], rows[5, : e.model.trained.size])


def test_statistics_of_a_client_do_not_depend_on_others_in_round_1() -> None:
    rows = []
    for other in (2, 4):
        e = with_norm()
        algorithm = play(e, FedBN(), 1, [[0, other]])
        rows.append(algorithm.personal.take(deployed(e, algorithm)[0]))
    equal(*rows)


def test_every_batch_norm_of_a_resnet_is_personal() -> None:
    """By type, shortcuts included, whatever their names."""
    module = ResNet((3, 8, 8), 3, [4, 8])
    model = FlatModel(module)
    personal = FedBN().personal_columns(model)
    layers = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert personal.size == sum(4 * m.num_features for m in layers) and len(layers) > 4


def test_all_norms_include_layer_norm() -> None:
    cfg = compose(["algorithm=fedbn", "model=vit_tiny", "algorithm.norms=all", "dataset=digits"])
    federation = Federation.build(*ragged(shape=(1, 8, 8)), torch.device("cpu"))
    model = build.model(cfg, federation)
    assert FedBN("all").personal_columns(model).size > 0 == FedBN().personal_columns(model).size


def test_evaluation_deploys_each_clients_norm() -> None:
    e = with_norm()
    algorithm = play(e, FedBN(), 1, [[1, 3]])
    some = all_clients(e, 1, "evaluation").subset(np.isin(np.arange(6), [3]))
    equal(algorithm.personalized(some, False)[0], deployed(e, algorithm)[3])
