"""FedGH: the server's training by hand, and its limits."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, six_clients
from tiny import HEAD, arrays_of, close, deployed, engine, equal, mlp, play, split_of

from fedbench.algorithms._features import class_statistics, features_of_samples
from fedbench.algorithms.fedgh import FedGH
from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.local import Local
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD


def test_the_server_takes_a_step_on_class_means_by_hand() -> None:
    """Weight and bias move by -eta_s mean of (softmax - e_c) z^T and (softmax - e_c), over the class means z."""
    e = six_clients(batch_size=100)
    a = play(e, FedGH(head_lr=0.7), 1, [[0, 4]])
    cohort = Cohort(e, np.array([0, 4]), 0)
    of = class_statistics(*features_of_samples(cohort, a.theta[cohort.ids]), 3)
    present = of.counts > 0
    z, c = of.means[present], torch.arange(3).expand(2, -1)[present]
    head = e.model.named(e.model.init_row())
    error = (z @ head["head.weight"].T + head["head.bias"]).softmax(1) - torch.eye(3)[c]  # [m, C]
    moved = e.model.named(a.head.put(e.model.init_row(), a.h))
    close(moved["head.weight"], head["head.weight"] - 0.7 * error.T @ z / len(z), 1e-6)
    close(moved["head.bias"], head["head.bias"] - 0.7 * error.mean(0), 1e-6)


def test_the_server_takes_batches_in_turn() -> None:
    """In batches of 2: with zero features only the bias moves, by -eta_s mean of (softmax - e_c)."""
    e = six_clients(batch_size=2)
    a = play(e, FedGH(head_lr=0.5), rounds=0)
    cohort, classes = Cohort(e, np.arange(6), 0), torch.tensor([0, 1, 2, 2, 0])
    h = a.train_head(cohort, torch.zeros(5, 8), classes)
    bias = e.model.named(e.model.init_row())["head.bias"]
    for batch in classes.split(2):
        bias = bias - 0.5 * (bias.softmax(0) - torch.eye(3)[batch].mean(0))
    close(e.model.named(a.head.put(e.model.init_row(), h))["head.bias"], bias, 1e-6)
    equal(a.train_head(cohort, torch.zeros(0, 8), classes[:0]), a.h)


def test_fedgh_whose_head_stands_trains_bases_from_it() -> None:
    """One round is Local's and LG-FedAvg's but for the head that is deployed."""
    e, f, g = (six_clients(SGD(lr=0.1), epochs=2) for _ in range(3))
    a, b, c = play(e, FedGH(head_lr=1e-30), 1), play(f, LGFedAvg(update="joint"), 1), play(g, Local(), 1)
    equal(a.theta.whole(), b.theta.whole())
    equal(a.theta.whole(), deployed(g, c))
    equal(a.h, a.head.take(e.model.init_row()))
    play(e, a, 2, COHORTS[1:], begin=1)
    equal(a.head.take(deployed(e, a)), a.h.expand(6, -1))


def test_fedgh_refuses_what_it_cannot_train() -> None:
    x = np.zeros((4, 16), np.float32)
    e = engine(arrays_of(x, x[:, :3], 3, task="regression"), split_of([2, 2]), mlp(), columns=HEAD)
    with pytest.raises(ConfigError, match="algorithm=fedgh needs one class per sample"):
        FedGH().check(e.federation, e.model, e.optimizer)
    with pytest.raises(ConfigError, match=r"set algorithm\.head_lr to a number"):
        FedGH().check_settings(2, ["head"], SGD(lr=[0.1, 0.2]))
