"""Per-FedAvg, first order and Hessian-free: steps by hand, and drawn batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import points, row, six_clients
from tiny import (
    all_clients,
    close,
    deployed,
    engine_on,
    equal,
    play,
    targets_federation,
)
from torch import nn

from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining


@pytest.mark.parametrize("mode, want", [("fo", 2.875), ("hf", 3.15625)])
def test_per_fedavg_by_hand(mode: str, want: float) -> None:
    """w = 4, c = 1, a = 0.25, b = 0.5:  adapted 4 - 0.25 x 3 = 3.25, g = 2.25.  FO: 4 - 0.5 x 2.25 = 2.875.
    HF, Hessian 1: 4 - 0.5 (2.25 - 0.25 x 2.25) = 3.15625."""
    e = points([[1, 1, 1]], lr=0.5, start=4.0)
    close(play(e, PerFedAvg(mode, alpha=0.25)).w, row(want), 1e-4)


def test_per_fedavg_adapts_and_steps_on_different_samples() -> None:
    """Samples 1 and 2, batches of one, w = 4, a = 0.25, b = 0.5.  Adapted on 1: 3.25, g = 3.25 - 2, w = 3.375;
    adapted on 2: 3.5, g = 3.5 - 1, w = 2.75."""
    found = {
        round(float(play(points([[1, 2]], 0.5, 4.0, batch_size=1, seed=seed), PerFedAvg(alpha=0.25)).w), 4)
        for seed in range(8)
    }
    assert found == {3.375, 2.75}


@pytest.mark.parametrize("delta", [1e-3, 0.1, 10.0])
def test_per_fedavg_hf_is_exact_on_quadratics(delta: float) -> None:
    """f = 0.5 (x . theta)^2, H = x x^T: the gradient of f(theta - a H theta) is (I - a H) H (I - a H) theta."""
    x, a, b = torch.tensor([1.0, -2.0, 0.5]), 0.3, 0.1
    theta, h = torch.tensor([0.7, 0.2, -1.0]), torch.outer(x, x)
    federation = targets_federation([np.zeros((3, 1))])
    federation.inputs = x.expand(3, 3).clone()
    line = nn.Sequential(nn.Linear(3, 1, bias=False))
    line[0].weight.data = theta[None].clone()
    e = engine_on(federation, line, SGD(lr=b))
    shrink = torch.eye(3) - a * h
    close(play(e, PerFedAvg("hf", alpha=a, delta=delta)).w, theta - b * shrink @ h @ shrink @ theta, 2e-4)


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_per_fedavg_without_inner_step_is_sgd_on_the_second_part(mode: str) -> None:
    e, other, parts = six_clients(epochs=2), six_clients(epochs=2), {"fo": 2, "hf": 3}[mode]
    a = play(e, PerFedAvg(mode, alpha=0.0))
    theta = (
        all_clients(other)
        .train(
            other.model.init_row(),
            step=lambda s, batch: s.descend(s.grad(batch.split(parts)[1])),
            how=LocalTraining(batch_size=5 * parts, drop_last=True),
        )
        .theta
    )
    close(a.w, all_clients(other).weights @ theta, 1e-6)
    equal(deployed(e, a), a.w.expand(6, -1))  # nothing to adapt: FedAvg's evaluation
    uniform = play(replace(six_clients(epochs=2), client_weights="uniform"), PerFedAvg(mode, alpha=0.0))
    close(uniform.w, theta.mean(0), 1e-6)


def test_per_fedavg_takes_a_step_per_double_batch() -> None:
    """Sizes 7, 21, 12, 4, 18, 9 and B = 5: floor(n / 10) outer steps, one where a client has fewer than 10."""
    e = six_clients()
    a = play(e, PerFedAvg(), rounds=0)
    cohort = all_clients(e)
    a.round(cohort)
    assert cohort.cost.steps == 1 + 2 + 1 + 1 + 1 + 1


def test_per_fedavg_deploys_one_keyed_step() -> None:
    """A step of size alpha (null: the optimizer's rate) on one batch of B samples, keyed by round and client."""
    samples = [[float(i) for i in range(20)], [100.0 + i for i in range(20)]]
    e = points(samples, lr=0.5, start=3.0, batch_size=1)
    a = play(e, PerFedAvg(alpha=0.25), rounds=0)
    rows = [deployed(e, a, r)[:, 0] for r in range(6)]
    drawn = torch.stack([(r - 3) / 0.25 + 3 for r in rows])  # [6, 2]
    close(drawn, drawn.round(), 1e-4)
    assert ((drawn[:, 0] < 20) & (drawn[:, 1] >= 100)).all() and len(set(drawn[:, 0].tolist())) > 2
    equal(rows[0], deployed(e, a, 0)[:, 0])
    equal(a.personalized(Cohort(e, np.array([1]), 2, "evaluation"), False)[0], rows[2][1:])
    by_rate = deployed(e, play(e, PerFedAvg(), rounds=0))[:, 0]
    close(by_rate, 3 - 0.5 * (3 - drawn[0]), 1e-4)


def test_per_fedavg_refuses_clients_it_cannot_split() -> None:
    with pytest.raises(ConfigError, match="only 1 training sample: use fewer clients"):
        play(points([[1], [1, 2]], 0.1), PerFedAvg())
