"""FedProto: its limits, prototypes by hand, and what is sent."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, four_of_six
from tiny import all_clients, close, deployed, equal, play

from fedbench.algorithms.fedproto import FedProto
from fedbench.algorithms.local import Local
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD


def test_without_the_term_the_rows_are_locals() -> None:
    a, b = four_of_six(), four_of_six()
    one, other = play(a, FedProto(0.0), 3, COHORTS_OF_FOUR), play(b, Local(), 3, COHORTS_OF_FOUR)
    close(one.theta.whole(), deployed(b, other), 1e-6)


def test_prototypes_are_class_means_of_features() -> None:
    """At learning rate 0, features do not move: G[c] is the mean over all samples of c of the cohort."""
    e = four_of_six(SGD(lr=1e-30), batch_size=3, epochs=1)
    algorithm = play(e, FedProto(), 1, [[0, 2]])
    y, z = [], []
    for client in (0, 2):
        index = torch.from_numpy(e.federation.splits["train"][client])
        inputs, targets = e.federation.gather(index)
        z.append(e.model.features(e.model.init_row(), inputs))
        y.append(targets)
    z, y = torch.cat(z), torch.cat(y)
    for c in range(e.federation.num_classes):
        if bool((y == c).any()):
            close(algorithm.G[c], z[y == c].mean(0), 1e-5)
        assert bool(algorithm.has_prototype[c]) == bool((y == c).any())


def test_uniform_weights_average_clients() -> None:
    e = four_of_six(SGD(lr=1e-30), batch_size=3, epochs=1)
    algorithm = play(e, FedProto(weights="uniform"), 1, [[0, 2]])
    alone = [play(four_of_six(SGD(lr=1e-30), batch_size=3, epochs=1), FedProto(), 1, [[i]]) for i in (0, 2)]
    has = torch.stack([a.has_prototype for a in alone])  # [2, C]
    G = torch.stack([a.G for a in alone])
    close(algorithm.G, (G * has[..., None]).sum(0) / has.sum(0).clamp_min(1)[:, None], 1e-5)


def test_a_class_that_nobody_has_loses_its_prototype() -> None:
    e = four_of_six()
    algorithm = play(e, FedProto(), 1, [[0, 1, 2, 3]])
    algorithm.has_prototype.fill_(1.0)
    algorithm.round(Cohort(e, np.array([4]), 1))
    labels = set(e.federation.gather(torch.from_numpy(e.federation.splits["train"][4]))[1].tolist())
    assert {c for c in range(e.federation.num_classes) if algorithm.has_prototype[c]} == labels


def test_prototypes_are_sent_and_no_parameters() -> None:
    """Up: C F means and C counts of 4 bytes each; down: G and has_prototype."""
    e = four_of_six()
    algorithm = FedProto()
    algorithm.setup(e.federation, e.model, e.rows)
    cohort = Cohort(e, np.array([0, 1]), 0)
    algorithm.round(cohort)
    C, F = algorithm.G.shape
    assert cohort.cost.bytes_up == 2 * 4 * C * (F + 1) and cohort.cost.bytes_down == 2 * 4 * C * (F + 1)


def test_the_nearest_prototype_is_predicted() -> None:
    e = four_of_six()
    algorithm = play(e, FedProto(), 2, COHORTS_OF_FOUR)
    rows = algorithm.personalized(all_clients(e, 2, "evaluation"), False)
    x = e.federation.gather(torch.from_numpy(e.federation.splits["test"][0])[None])[0]
    one = {name: t[:1] for name, t in rows.items()}
    logits = algorithm.predict(e.model, one, x)[0]  # [b, C]
    z = e.model.features(one["theta"], x)[0]
    distances = (z[:, None] - algorithm.G).square().sum(2) + torch.where(algorithm.has_prototype > 0, 0, torch.inf)
    equal(logits.argmax(1), distances.argmin(1))


@pytest.mark.parametrize("predict_by", ["head", "prototypes"])
def test_before_the_first_round_the_head_predicts(predict_by: str) -> None:
    e = four_of_six()
    algorithm = FedProto(predict_by=predict_by)  # type: ignore[arg-type]
    algorithm.setup(e.federation, e.model, e.rows)
    assert set(algorithm.personalized(all_clients(e, 0, "evaluation"), False)) == {"theta"}
