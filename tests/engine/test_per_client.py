"""Hyperparameters with one value for each client, in all methods that accept lists."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    CPU,
    HEAD,
    Point,
    all_clients,
    close,
    compose,
    deployed,
    engine,
    engine_on,
    equal,
    mlp,
    play,
    ragged,
    targets_federation,
)
from torch import Tensor

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.feddyn import FedDyn
from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.per_client import PerClient, fractions, mean, per_client
from fedbench.nn.flat import FlatModel
from fedbench.simulation.build import make

IDS = np.array([0, 1, 3, 5])  # of 6 clients with 7, 21, 4 and 9 samples: a step has them in another order
CHANGED = 1  # the client whose number is changed, second here and first in a step
WEIGHTS, PARTS = [0.0, 3.0, 1.0, 0.5, 2.0, 4.0], [0.1, 0.9, 0.3, 0.0, 0.5, 1.0]
SIZES, BOUNDS = [0.02, 0.3, 0.1, 0.05, 0.2, 0.4], [0.1, 0.2, 0.15, 0.24, 0.05, 0.3]


@dataclass(frozen=True)
class Case:
    """The option of a method, its values [6], the other options, and after how many rounds it first shows.

    rate: it goes to `descend`, where one number is the alpha= of an add_: equal up to rounding.  shared: what the
    server sends has the mean of the list in it, so that others' numbers are felt in the last digit.
    """

    method: str
    option: str
    values: list[float]
    rounds: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    rate: bool = False
    shared: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.method, self.option, *map(str, self.more.values())])


CASES = [
    Case("fedprox", "mu", WEIGHTS),
    Case("ditto", "lam", WEIGHTS),
    Case("pgfed", "mu", WEIGHTS, 2, shared=True),
    Case("pgfed", "eta2", SIZES, 2),
    Case("pgfed", "alpha_max", BOUNDS, 2),
    Case("pgfed_mo", "beta", [0.1, 0.9, 0.3, 0.2, 0.5, 1.0], 3),
    Case("pgfed_ce", "mu", WEIGHTS, 2, shared=True),
    Case("pgfed_ce", "eta2", SIZES, 2),
    Case("pgfed_ce", "alpha_max", BOUNDS, 2),
    Case("pgfed_exact", "mu", WEIGHTS),
    Case("apple", "mu", WEIGHTS, more={"fraction": 1.0}),
    Case("apple", "eta2", SIZES, rate=True),
    Case("apfl", "alpha", PARTS),
    Case("apfl_adaptive", "alpha", PARTS),
    Case("pfedme", "lam", WEIGHTS),
    Case("pfedme", "inner_lr", SIZES, more={"lam": 1.0}, rate=True),
    Case("fedamp", "lam", WEIGHTS, more={"alpha_k": 0.3}),
    Case("heurfedamp", "lam", WEIGHTS, more={"alpha_k": 0.3}),
    Case("per_fedavg", "alpha", SIZES, rate=True),
    Case("per_fedavg_hf", "alpha", SIZES, rate=True),
    Case("per_fedavg_hf", "delta", [0.5, 2.0, 1.0, 0.1, 3.0, 0.7]),
    Case("feddyn", "alpha", SIZES),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@functools.cache
def options(method: str) -> dict[str, Any]:
    return dict(compose([f"algorithm={method}"]).algorithm)


def method(case: Case, value: float | list[float]) -> Algorithm:
    return make({**options(case.method), **case.more, case.option: value})


def network(plan: str = "vmap") -> Engine:
    model = FlatModel(mlp(), HEAD, new_module=lambda *_: mlp())  # APPLE's cores start from one point
    return engine(*ragged(), model, SGD(lr=0.1, momentum=0.9), plan=plan, epochs=2, cohort_size=len(IDS))


def played(case: Case, value: float | list[float], plan: str = "vmap") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Clients IDS, rounds in which they take part: what each has then [4, ...] (its rows, what it trained in the last
    round, what it would have deployed before the first), and what the server has."""
    e, a = network(plan), method(case, value)
    a.check(e.federation, e.model, e.optimizer)
    a.setup(e.federation, e.model, e.rows)
    with torch.no_grad():
        first = a.personalized(Cohort(e, IDS, 0, "evaluation"), False)
    each = {"first": first.expand(len(IDS), -1).clone()}
    for r in range(case.rounds):
        cohort = Cohort(e, IDS, r)
        train = cohort.train
        cohort.train = lambda *args, train=train, **more: kept(each, train(*args, **more))  # type: ignore
        a.round(cohort)
    return {**each, **{name: rows[IDS] for name, rows in e.rows.all.items()}}, a.state_dict()


def kept(into: dict[str, Tensor], out: Any) -> Any:
    into["trained"] = out.theta.clone()
    return out


@each_case
@pytest.mark.parametrize("plan", ["vmap", "loop"])
def test_a_list_of_equal_values_is_one_value(case: Case, plan: str) -> None:
    value = case.values[3] or 0.7
    listed, one = played(case, [value] * 6, plan), played(case, value, plan)
    for a, b in zip(listed, one):
        (close if case.rate else equal)(a, b)


@each_case
def test_a_changed_value_changes_only_its_client(case: Case) -> None:
    values = [case.values[0]] * 6
    before, _ = played(case, values)
    values[CHANGED] = case.values[CHANGED]
    after, _ = played(case, values)
    others = torch.from_numpy(IDS != CHANGED)
    for name in before:
        (functools.partial(close, tolerance=1e-6) if case.shared and name == "A" else equal)(
            after[name][others], before[name][others]
        )
    moved = [name for name in before if not torch.allclose(after[name][~others], before[name][~others], atol=1e-4)]
    assert moved


@each_case
def test_a_client_behaves_as_if_all_had_its_value(case: Case) -> None:
    mixed, _ = played(case, case.values)
    for position, client in enumerate(IDS):
        alone, _ = played(case, case.values[client])
        for name in mixed:
            close(mixed[name][position], alone[name][position])


@each_case
def test_executors_agree_for_lists(case: Case) -> None:
    whole = played(case, case.values)
    for plan in ("loop", "threaded pairs"):
        for a, b in zip(played(case, case.values, plan), whole):
            close(a, b)


@each_case
def test_a_list_is_checked(case: Case) -> None:
    e = network()
    with pytest.raises(ConfigError, match=rf"algorithm.{case.option} lists 2 values, and there are 6 training clients"):
        method(case, [0.1, 0.2]).check(e.federation, e.model, e.optimizer)
    cfg = compose([f"algorithm={case.method}"])
    cfg.algorithm[case.option] = [0.1, 0.2]
    check(cfg)
    cfg.algorithm[case.option] = [0.1, -1]
    with pytest.raises(ConfigError, match=rf"algorithm.{case.option} must be .*, got \[0.1, -1\]"):
        check(cfg)


def test_arithmetic_is_in_float64() -> None:
    """Products are rounded to float32 once, as those of Python numbers."""
    a, b, numbers = per_client([0.1, 0.3, 1e-4]), per_client([0.7, 1.1, 3.0]), [0.1, 0.3, 1e-4]
    both = torch.tensor([x * y for x, y in zip(numbers, [0.7, 1.1, 3.0])])[:, None]
    ids = np.arange(3)
    equal((a * b).of(ids, CPU), both)
    equal((b * a).of(ids, CPU), both)
    for found, one in (
        (a * 0.3, lambda x: x * 0.3),
        (0.3 * a, lambda x: 0.3 * x),
        (a / 0.3, lambda x: x / 0.3),
        (1 - a, lambda x: 1 - x),
    ):
        equal(found.of(ids, CPU), torch.tensor([one(x) for x in numbers])[:, None])
    assert per_client(0.5) == 0.5 and per_client(None) is None
    assert not PerClient([0, 0]) and PerClient([0, 1]) and len(a) == 3


def test_values_of_a_cohort() -> None:
    cohort = Cohort(network(), np.array([1, 4]), 0)
    values = PerClient([1, 2, 3, 4, 6, 5])
    equal(cohort.value(values), torch.tensor([[2.0], [6.0]]))
    assert cohort.value(0.3) == 0.3 and cohort.value(None) is None
    equal(fractions(values, cohort.context), torch.tensor([0.25, 0.75]))
    equal(fractions(0.3, cohort.context), torch.tensor([0.5, 0.5]))
    assert mean(values) == 3.5 and mean(0.3) == 0.3


def test_per_fedavg_adapts_with_the_step_size_of_each_client() -> None:
    w, case = network().model.init_row(), Case("per_fedavg", "alpha", SIZES)
    (listed, _), (whole, _) = played(case, SIZES), played(case, 1.0)
    close(listed["first"] - w, torch.tensor(SIZES)[IDS][:, None] * (whole["first"] - w))


def test_apfl_keeps_the_learned_alpha() -> None:
    e, a = network(), make({**options("apfl_adaptive"), "alpha": PARTS})
    play(e, a, 2, [IDS, IDS])  # in round 1 there is nothing between v and w
    learned = a.a[np.arange(6)][:, 0]
    start = torch.tensor(PARTS)
    equal(learned[[2, 4]], start[[2, 4]])
    assert not torch.isclose(learned[[0, 1]], start[[0, 1]]).any()


# -- FedDyn's server -------------------------------------------------------------------------------------
ALPHA = [0.5, 2.0, 1.0]
TARGETS = [np.array([[b, 2 * b]]) for b in (1.0, -3.0, 4.0)]


def dynamic(alpha: float | list[float], cohorts: list[list[int]]) -> tuple[Engine, FedDyn]:
    """f_i = 0.5 ||theta - b_i||^2, each round's problem solved."""
    e = engine_on(targets_federation(TARGETS), Point([0.0, 0.0]), SGD(lr=0.3), epochs=60, batch_size=1)
    a = FedDyn(alpha)
    play(e, a, len(cohorts), cohorts)
    return e, a


def test_feddyn_minimizes_the_augmented_lagrangian() -> None:
    """With everyone: sum_i g_i + alpha_i (w - theta_i) = 0 at theta_i = (b_i + g_i + alpha_i w') / (1 + alpha_i), w'
    the w before and g_i as it was; g_i then falls by alpha_i (theta_i - w')."""
    alpha, b = torch.tensor(ALPHA)[:, None], torch.tensor(np.concatenate(TARGETS)).float()
    g, w = torch.zeros(3, 2), torch.zeros(2)
    for _ in range(3):
        theta = (b + g + alpha * w) / (1 + alpha)
        g = g - alpha * (theta - w)
        w = ((alpha * theta).sum(0) - g.sum(0)) / alpha.sum()
    close(dynamic(ALPHA, [[0, 1, 2]] * 3)[1].w, w)


def test_feddyn_keeps_the_mean_of_all_gradients_and_finds_the_common_minimum() -> None:
    e, a = dynamic(ALPHA, [[0, 1], [1, 2], [0, 2], [0, 1, 2]] * 12)
    close(a.h, a.g[np.arange(3)].mean(0), 1e-4)
    close(deployed(e, a)[0], torch.tensor(np.mean(TARGETS, axis=0)[0]).float(), 1e-2)
    assert len(all_clients(e)) == 3
