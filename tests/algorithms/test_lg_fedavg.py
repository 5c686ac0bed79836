"""LG-FedAvg: steps by hand, and its limits."""

import pytest
import torch
from by_hand import COHORTS, products, six_clients
from tiny import (
    close,
    deployed,
    equal,
    play,
)

from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.local import Local
from fedbench.engine.optim import SGD, Adam


@pytest.mark.parametrize("update, h", [("alternate", (2.072 + 2.288) / 2), ("joint", 2.2)])
def test_lg_fedavg_by_hand(update: str, h: float) -> None:
    """u = 1, h = 2, lr 0.1, c = (3, 5): u = 1 + 0.1 (1, 3) 2 = (1.2, 1.6).  alternate, at the new base:
    h = 2 + 0.1 (0.6 x 1.2, 1.8 x 1.6) = (2.072, 2.288);  joint, at the old one: 2 + 0.1 (1, 3) = (2.1, 2.3)."""
    e = products([3, 5], SGD(lr=0.1))
    close(deployed(e, play(e, LGFedAvg(update))), torch.tensor([[1.2, h], [1.6, h]]))


@pytest.mark.parametrize("drift", [False, True])
def test_lg_fedavg_momentum_of_the_part_that_waits(drift: bool) -> None:
    """Momentum 0.9, two batches, c = 3: per part v <- 0.9 v + g, theta <- theta - lr v.  With the drift, the part
    that waits takes the same step with g = 0."""
    at, v, lr = [1.0, 2.0], [0.0, 0.0], 0.05
    for _ in range(2):
        for part in (0, 1):
            g = (at[0] * at[1] - 3) * at[1 - part]
            for i in (0, 1):
                if i == part or drift:
                    v[i] = 0.9 * v[i] + (g if i == part else 0)
                    at[i] -= lr * v[i]
    e = products([3], SGD(lr=lr, momentum=0.9), epochs=2)
    close(deployed(e, play(e, LGFedAvg(frozen_momentum_drift=drift)))[0], torch.tensor(at))


@pytest.mark.parametrize("update", ["alternate", "joint"])
def test_lg_fedavg_without_a_head_is_local(update: str) -> None:
    """A part without columns takes no step."""
    e, other = six_clients(columns={"head": []}, epochs=2), six_clients(epochs=2)
    a, b = play(e, LGFedAvg(update), 3, COHORTS), play(other, Local(), 3, COHORTS)
    equal(deployed(e, a), deployed(other, b))


def test_lg_fedavg_adam_counts_one_step_a_batch() -> None:
    """Base and head each follow Adam with a count of their own: batch t is its step t."""
    at, m, v, lr = [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], 0.1
    for t in (1, 2, 3):
        for part in (0, 1):
            g = (at[0] * at[1] - 3) * at[1 - part]
            m[part], v[part] = 0.9 * m[part] + 0.1 * g, 0.999 * v[part] + 0.001 * g * g
            at[part] -= lr * (m[part] / (1 - 0.9**t)) / ((v[part] / (1 - 0.999**t)) ** 0.5 + 1e-8)
    e = products([3], Adam(lr=lr), epochs=3)
    close(deployed(e, play(e, LGFedAvg()))[0], torch.tensor(at))
