"""SCAFFOLD: sums of the control variates, and rounds by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import COHORTS_OF_FOUR, LR, NUMBERS, START, B, W, descent, four_of_six, squares
from tiny import (
    Affine,
    Point,
    all_clients,
    close,
    engine_on,
    play,
    targets_federation,
)

from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.scaffold import Scaffold
from fedbench.core.options import ConfigError
from fedbench.engine.optim import SGD, Adam, Optimizer


def test_scaffolds_first_round_is_fedavg_with_uniform_weights() -> None:
    class Uniform(FedAvg):
        def round(self, cohort):
            self.w = cohort.train(self.w).theta.mean(0)

    a, b, c = (four_of_six(SGD(lr=LR)) for _ in range(3))
    close(play(a, Scaffold(), 1, COHORTS_OF_FOUR).x, play(b, Uniform(), 1, COHORTS_OF_FOUR).w)
    close(
        play(c, Scaffold(weights="samples"), 1, COHORTS_OF_FOUR).x,
        play(four_of_six(SGD(lr=LR)), FedAvg(), 1, COHORTS_OF_FOUR).w,
    )


def test_scaffolds_variates_sum_to_the_servers() -> None:
    e = four_of_six(SGD(lr=LR))
    algorithm = Scaffold()
    for r in range(4):
        play(e, algorithm, 1, COHORTS_OF_FOUR[r : r + 1], begin=r)
        close(algorithm.c_i[np.arange(6)].sum(0), 6 * algorithm.c, 1e-4)
        assert algorithm.c.abs().max() > 0


def test_scaffold_with_one_full_batch_step_learns_the_mean_gradient() -> None:
    """c_i+ = c_i - c + (x - theta_i) / lr, theta_i = x - lr (grad f_i(x) + c - c_i): c_i+ = grad f_i(x)."""
    e = four_of_six(SGD(lr=LR), batch_size=100)
    algorithm = play(e, Scaffold(), 1)
    for r in range(1, 3):
        g, _ = all_clients(e).gradient(algorithm.x)
        play(e, algorithm, 1, begin=r)
        close(algorithm.c_i[np.arange(6)], g, 1e-4)
        close(algorithm.c, g.mean(0), 1e-4)


@pytest.mark.parametrize("server_lr, weights", [(1.0, "uniform"), (0.5, "samples")])
def test_scaffold_by_hand(server_lr: float, weights: str) -> None:
    """Algorithm 1, option II, in numbers: three clients, two of them a round, 2 steps on squares of gradient
    theta - b_i + c - c_i, so a descent to b_i + c_i - c; c_i+ = c_i - c + (x - theta_i) / (2 lr);
    c <- c + sum (c_i+ - c_i) / 3."""
    e, cohorts = squares(steps=2, cohort_size=2), [[0, 1], [1, 2], [0, 2], [0, 1]]
    algorithm = play(e, Scaffold(server_lr, weights), 4, cohorts)
    x, c, c_i, n = W, torch.zeros(3), torch.zeros(3, 3), torch.tensor(NUMBERS).float()
    for s in cohorts:
        theta = descent(x, B[s] + c_i[s] - c, 2)
        new = c_i[s] - c + (x - theta) / (2 * LR)
        p = n[s] / n[s].sum() if weights == "samples" else torch.full((2,), 0.5)
        x, c = x + server_lr * p @ (theta - x), c + (new - c_i[s]).sum(0) / 3
        c_i[s] = new
    close(algorithm.x, x)
    close(algorithm.c, c)
    close(algorithm.c_i[np.arange(3)], c_i)


def test_scaffold_counts_the_steps_a_client_really_takes() -> None:
    """Ragged clients: with constant gradients -d_i the variates are exactly -d_i, whatever the number of steps."""
    d = [np.full((n, 3), -i - 1.0, np.float32) for i, n in enumerate((2, 7, 11))]
    e = engine_on(targets_federation(d, Affine()), Point(START), SGD(lr=LR), batch_size=3)
    algorithm = play(e, Scaffold())
    close(algorithm.c_i[np.arange(3)], -torch.arange(1.0, 4)[:, None].expand(-1, 3))
    assert all_clients(e).train(e.model.init_row()).steps.tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=LR, momentum=0.9), SGD(lr=LR, weight_decay=0.1), SGD(lr=LR, clip=1.0), Adam(lr=LR)]
)
def test_scaffold_refuses_what_its_variates_are_not_derived_for(optimizer: Optimizer) -> None:
    with pytest.raises(ConfigError, match=r"algorithm=scaffold needs plain SGD"):
        play(four_of_six(optimizer), Scaffold())


def test_a_round_at_learning_rate_zero_teaches_no_variate() -> None:
    """A schedule may fall to 0, where (x - theta) / (steps lr) is 0 / 0."""
    e = replace(four_of_six(SGD(lr=LR, schedule={"name": "exponential", "gamma": 0.0})), rounds=2)
    algorithm = play(e, Scaffold(), 1, COHORTS_OF_FOUR)
    before = algorithm.c_i.whole()
    assert e.optimizer.rate(1, 2, e.federation.splits["train"].owners()[:1]) == 0
    play(e, algorithm, 1, COHORTS_OF_FOUR[1:2], begin=1)
    close(algorithm.c_i.whole(), before)
    assert torch.isfinite(algorithm.c).all() and bool(before.any())
