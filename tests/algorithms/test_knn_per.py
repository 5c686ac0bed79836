"""kNN-Per: its limits, padding, and the choice of lam."""

import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six, products
from tiny import HEAD, all_clients, close, deployed, engine, equal, mlp, play, ragged

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.knn_per import KNNPer, neighbours
from fedbench.core.options import ConfigError
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD

Z = torch.tensor([[[0.0, 0.0], [3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])  # stored features
Y = torch.tensor([[0, 1, 1, 2]])


def with_validation(val: int = 6) -> Engine:
    return engine(*ragged(val=(val,) * 6), mlp(), SGD(lr=0.1), columns=HEAD)


def test_neighbours_by_hand() -> None:
    """At (0, 0) with k = 3, s = 2: weights exp(-d^2 / 4) of d^2 = 0, 9, 16."""
    e = torch.tensor([0.0, -9 / 4, -16 / 4]).exp()
    p = neighbours(torch.zeros(1, 1, 2), Z, Y, 3, 2.0, 3)
    close(p[0, 0], torch.stack([e[0], e[1] + e[2], torch.tensor(0.0)]) / e.sum())


def test_neighbours_of_a_wide_kernel_are_label_shares() -> None:
    close(neighbours(torch.randn(1, 5, 2), Z, Y, 4, 1e9, 3), torch.tensor([0.25, 0.5, 0.25]).expand(1, 5, 3))


def test_neighbour_of_a_narrow_kernel_is_the_nearest_sample() -> None:
    """Also where all weights would round to 0."""
    at = torch.tensor([[[9.0, 9.0], [3.1, 0.0], [1e3, 1e3]]])
    equal(neighbours(at, Z, Y, 4, 1e-9, 3).argmax(2), torch.tensor([[2, 1, 2]]))


def test_neighbours_leave_out_padding() -> None:
    """Also where there are fewer than k samples."""
    padded, classes = torch.cat([Z, torch.zeros(1, 2, 2)], 1), torch.cat([Y, torch.full((1, 2), -1)], 1)
    at = torch.randn(1, 3, 2)
    equal(neighbours(at, padded, classes, 6, 1.0, 3), neighbours(at, Z, Y, 4, 1.0, 3))


def test_knn_per_without_neighbours_is_fedavg() -> None:
    e, f = four_of_six(), four_of_six()
    a, b = play(e, KNNPer(lam=0), 2, COHORTS_OF_FOUR), play(f, FedAvg(), 2, COHORTS_OF_FOUR)
    equal(a.w, b.w)
    ours = all_clients(e).forward(deployed(e, a), a.predict)
    for p, logits in zip(ours, all_clients(f).forward(b.w), strict=True):
        close(p, logits.log_softmax(1))


def test_a_client_chooses_its_lam_by_accuracy_on_validation_samples() -> None:
    e = with_validation()
    a = play(e, KNNPer(k=3), 2)
    lam = deployed(e, a)["lam"]  # [N, 1]
    y = [e.federation.targets[torch.from_numpy(e.federation.splits["val"][i])] for i in range(6)]
    accuracy = []
    for value in torch.linspace(0, 1, 11):
        fixed = KNNPer(k=3, lam=float(value))
        fixed.setup(e.federation, e.model, e.rows)
        fixed.w = a.w
        p = all_clients(e).forward(deployed(e, fixed), fixed.predict, split="val")
        accuracy.append(torch.stack([(own.argmax(1) == of).float().mean() for own, of in zip(p, y)]))
    best = torch.stack(accuracy)  # [11, N]
    close(lam[:, 0], best.argmax(0) / 10)
    assert len(lam.unique()) > 1
    assert (deployed(four_of_six(), play(four_of_six(), KNNPer()))["lam"] == 0.5).all()  # no validation samples


def test_capacity_is_the_fraction_of_samples_that_are_stored() -> None:
    e = four_of_six()
    stored = (deployed(e, play(e, KNNPer(capacity=0.5)))["y"] >= 0).sum(1)
    assert stored.tolist() == [max(1, n // 2) for n in e.federation.num_samples.tolist()]


def test_knn_per_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="needs one class per sample"):
        play(products([1, 2], SGD(lr=0.1)), KNNPer())
