"""Optimizers equal those of torch.optim for each row; schedules and clipping."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from tiny import close, compose, equal
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from fedbench.core.options import ConfigError
from fedbench.core.settings import to_dict
from fedbench.engine.optim import SGD, Adam, Optimizer, ParameterIndex, Schedule
from fedbench.nn.columns import Columns

K, P, STEPS = 3, 7, 6
GENERATOR = torch.Generator().manual_seed(0)
START = torch.randn(K, P, generator=GENERATOR)
GRADIENTS = torch.randn(STEPS, K, P, generator=GENERATOR)
CASES = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "nesterov": (SGD(lr=0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    "decay": (SGD(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "all of sgd": (
        SGD(lr=0.1, momentum=0.8, weight_decay=0.3, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.8, weight_decay=0.3, nesterov=True),
    ),
    "adam": (Adam(lr=0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "adam, decay": (
        Adam(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.95), 1e-3, 0.3),
    ),
    "adamw": (Adam(lr=0.1, weight_decay=0.3, decoupled=True), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
}


def run(optimizer: Optimizer, start: Tensor, gradients: Tensor, lr: float | Tensor = 0.1) -> Tensor:
    theta = start.clone()
    state = {b: optimizer.new(b, theta) for b in optimizer.buffers}
    span = (0, theta.shape[1])
    columns, index = Columns([span]), ParameterIndex([span], theta.device)
    for g in gradients:
        before = g.clone()
        clipped = g if optimizer.clip is None else optimizer.clipped(g, g)
        optimizer.step(theta, clipped, columns, state, lr, index)
        equal(g, before)  # a step may use it again, for another row
    return theta


@pytest.mark.parametrize("name", CASES)
def test_each_row_is_updated_as_by_torch_optim(name: str) -> None:
    optimizer, make = CASES[name]
    theta = run(optimizer, START, GRADIENTS)
    for i in range(K):
        p = nn.Parameter(START[i].clone())
        reference = make([p])
        for g in GRADIENTS[:, i]:
            p.grad = g.clone()
            reference.step()
        close(theta[i], p.detach())


@pytest.mark.parametrize("name", CASES)
def test_no_columns_are_updated(name: str) -> None:
    """As by a method that also trains what is outside of its adapters, with adapter.train=[]."""
    optimizer, theta = CASES[name][0], START.clone()
    state = {b: optimizer.new(b, theta) for b in optimizer.buffers}
    optimizer.step(theta, GRADIENTS[0], Columns([]), state, 0.1, ParameterIndex([(0, theta.shape[1])], theta.device))
    equal(theta, START)


@pytest.mark.parametrize("name", CASES)
def test_a_learning_rate_per_row(name: str) -> None:
    optimizer, _ = CASES[name]
    rates = torch.tensor([[0.1], [0.02], [0.3]])
    theta = run(optimizer, START, GRADIENTS, rates)
    for i in range(K):
        close(theta[i : i + 1], run(optimizer, START[i : i + 1], GRADIENTS[:, i : i + 1], rates[i].item()))


def test_clipping_is_per_row() -> None:
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=0.1, clip=1.5)
    gradients = GRADIENTS * torch.tensor([0.1, 1.0, 10.0])[:, None]
    theta = run(optimizer, START, gradients)
    for i in range(K):
        p = nn.Parameter(START[i].clone())
        reference = torch.optim.SGD([p], 0.1, 0.9, weight_decay=0.1)
        for g in gradients[:, i]:
            p.grad = g.clone()
            torch.nn.utils.clip_grad_norm_([p], 1.5)
            reference.step()
        close(theta[i], p.detach())
    equal(SGD(lr=1.0, clip=1.0).clipped(torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2, 3))


def test_plain_optimizers_subtract_lr_times_gradient() -> None:
    assert SGD(lr=0.1).is_plain_sgd and SGD(lr=0.1, momentum=0.0, nesterov=False).is_plain_sgd
    assert not any(
        o.is_plain_sgd
        for o in (SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, clip=1.0), Adam(lr=0.1))
    )


def test_schedules() -> None:
    total = 10
    assert [Schedule()(r, total) for r in range(3)] == [1, 1, 1]
    assert [Schedule("exponential", gamma=0.5)(r, total) for r in range(3)] == [1, 0.5, 0.25]
    linear = [Schedule("linear", final=0.1)(r, total) for r in range(total)]
    assert linear[0] == 1 and linear[5] == pytest.approx(0.55) and linear[-1] == pytest.approx(0.19)
    cosine = [Schedule("cosine")(r, total) for r in range(total)]
    assert cosine == pytest.approx([(1 + math.cos(math.pi * r / 10)) / 2 for r in range(total)])
    warm = [Schedule("cosine", warmup=3, final=0.2)(r, total) for r in range(total)]
    assert warm[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert Schedule("cosine")(0, 1) == Schedule("linear")(0, 1) == 1


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("per", ["round", "step"])
def test_schedules_equal_those_of_torch(name: Any, per: Any, warmup: int) -> None:
    """T_max is the number of rounds, or steps, after the warm-up.  `final` is the factor after the last one."""
    rounds, steps = 8, 1 if per == "round" else 5
    schedule = Schedule(name, warmup=warmup, final=0.1, per=per)
    if per == "round":
        ours = np.array([schedule(r, rounds) for r in range(rounds)])
    else:
        ours = np.concatenate([schedule.of_steps(r, rounds, np.array([steps]))[:, 0] for r in range(rounds)])
    warm, left = warmup * steps, (rounds - warmup) * steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    first = LinearLR(optimizer, start_factor=1 / (warm + 1), total_iters=warm)
    if name == "cosine":
        then: Any = CosineAnnealingLR(optimizer, T_max=left, eta_min=0.1)
    else:
        then = LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=left)
    scheduler = SequentialLR(optimizer, [first, then], milestones=[warm]) if warm else then
    theirs = []
    for _ in range(rounds * steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(ours, theirs, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1) and ours[-1] > 0.1


def test_a_schedule_by_steps_over_a_run() -> None:
    """4 rounds, of 5 steps or of 2: a warm-up of 1.5 rounds, then down to 0 after the very last step, each client by
    its own clock."""
    schedule = Schedule("linear", warmup=1.5, per="step")
    tables = [schedule.of_steps(r, 4, np.array([5, 0, 2])) for r in range(4)]
    assert [t.shape for t in tables] == [(5, 3)] * 4
    five, two = np.concatenate([t[:, 0] for t in tables]), np.concatenate([t[:2, 2] for t in tables])
    assert five[:8] == pytest.approx([(s + 1) / 8.5 for s in range(8)])
    assert five[8:] == pytest.approx([1 - (s - 7.5) / 12.5 for s in range(8, 20)])
    assert two == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 0.8, 0.6, 0.4, 0.2])
    each = [Schedule("exponential", gamma=0.5, per="step").of_steps(r, 3, np.array([4]))[:, 0] for r in range(3)]
    assert np.concatenate(each) == pytest.approx([0.5 ** (s / 4) for s in range(12)])
    constant = Schedule(per="step").of_steps(0, 1, np.array([0]))
    assert constant.shape == (0, 1)


def test_the_rate_of_a_round() -> None:
    optimizer = SGD(lr=0.2, schedule={"name": "exponential", "gamma": 0.5})
    assert [optimizer.rate(r, 4, np.arange(2)) for r in range(3)] == [0.2, 0.1, 0.05]


def test_the_rates_of_clients() -> None:
    optimizer = SGD(lr=[0.2, 0.4, 0.8], schedule={"name": "exponential", "gamma": 0.5})
    optimizer.check(3)
    torch.testing.assert_close(optimizer.rate(1, 4, np.array([0, 2])), torch.tensor([[0.1], [0.4]]))
    with pytest.raises(ConfigError, match=r"optimizer.lr lists 3 rates, and there are 4 clients"):
        optimizer.check(4)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizer_yaml(name: str) -> None:
    built = instantiate(to_dict(compose([f"optimizer={name}"]))["optimizer"])
    assert isinstance(built, SGD if name == "sgd" else Adam)
    assert getattr(built, "decoupled", False) == (name == "adamw")


def test_nesterov_without_momentum_is_refused() -> None:
    """torch.optim refuses it as well."""
    with pytest.raises(ConfigError, match=r"optimizer.nesterov=true needs optimizer.momentum > 0"):
        SGD(lr=0.1, nesterov=True)
