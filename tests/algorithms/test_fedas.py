"""FedAS: its alignment, its weights, and its limits."""

import numpy as np
import pytest
import torch
from by_hand import COHORTS, again, products, six_clients
from tiny import all_clients, close, equal, play
from torch import Tensor

from fedbench.algorithms.fedas import FedAS
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD


class Uniform(FedAS):
    """FedAS with equal weights."""

    def trace(self, cohort: Cohort, theta: Tensor) -> Tensor:
        return torch.ones(len(cohort))


def test_fedas_of_one_client_without_alignment_is_fedavg() -> None:
    a, b = (six_clients(SGD(lr=0.1, momentum=0.9), sizes=[12], epochs=2) for _ in range(2))
    close(play(a, FedAS(align_lr=0.0), 3).w, play(b, FedAvg(), 3).w, 1e-6)


def test_fedas_without_alignment_and_with_equal_weights_is_fedper() -> None:
    e, f = six_clients(), six_clients(client_weights="uniform")
    a, b = play(e, Uniform(align_epochs=0), 3, COHORTS), play(f, FedPer(), 3, COHORTS)
    close(e.model.without("head").take(a.w), b.u, 1e-6)
    close(e.model.columns["head"].take(a.theta[np.arange(6)]), b.v[np.arange(6)], 1e-6)


def two_rounds() -> tuple[Engine, FedAS]:
    e = six_clients(SGD(lr=0.5), epochs=2)
    return e, play(e, FedAS(align_lr=0.2, align_batch_size=100), 2)


def test_alignment_is_a_step_towards_the_class_means_under_the_old_model() -> None:
    """Of the gradient of sum over c of mean |z - mu_c|^2 / F in the base; the head stays the client's."""
    e, a = two_rounds()
    cohort, base = all_clients(e, 2), e.model.without("head")
    theta = a.theta[cohort.ids]
    found = a.aligned(cohort, a.w, theta)
    for i in range(6):
        x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][i]))
        old = e.model.features(theta[i], x)
        w = a.w.clone().requires_grad_()
        z = e.model.features(w, x)
        loss = sum((z[y == c] - old[y == c].mean(0)).square().mean() for c in y.unique())
        (g,) = torch.autograd.grad(loss, w)
        close(base.take(found[i]), base.take(a.w - 0.2 * g), 1e-5)
    equal(e.model.columns["head"].take(found), e.model.columns["head"].take(theta))


@pytest.mark.parametrize("size", [100, 1])
def test_weights_are_squared_gradients_of_batches_or_samples(size: int) -> None:
    e, a = two_rounds()
    a.fisher_batch_size = size
    cohort = all_clients(e, 2)
    theta = a.theta[cohort.ids]
    t = a.trace(cohort, theta)
    equal(a.theta[cohort.ids], theta)
    for i in range(6):
        samples = torch.from_numpy(e.federation.splits["train"][i])
        total = 0.0
        for batch in samples.split(size):
            x, y = e.federation.gather(batch)
            row = theta[i].clone().requires_grad_()
            (g,) = torch.autograd.grad(e.task.loss(e.model.predict(row, x), y).mean(), row)
            total += g.square().sum()
        close(t[i], torch.as_tensor(total), 1e-4)


def test_the_server_weights_by_traces() -> None:
    e, a = two_rounds()
    again(e, a, 2, [1, 4])
    theta = a.theta[np.array([1, 4])]
    t = a.trace(Cohort(e, np.array([1, 4]), 2, "evaluation"), theta)
    close(a.w, (t / t.sum()) @ theta, 1e-6)


def test_fedas_refuses_targets_that_are_no_classes() -> None:
    with pytest.raises(ConfigError, match="algorithm=fedas needs one class per sample"):
        play(products([1, 2], SGD(lr=0.1)), FedAS())
