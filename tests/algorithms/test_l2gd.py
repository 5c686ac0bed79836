"""L2GD: a round by hand, its averaging step, and its limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, column, points, six_clients
from tiny import close, deployed, equal, play
from torch import Tensor

from fedbench.algorithms.base import LocalTraining
from fedbench.algorithms.l2gd import L2GD
from fedbench.algorithms.local import Local
from fedbench.channel.compression import Compression
from fedbench.compression.topk import TopK
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort


def test_a_round_by_hand() -> None:
    """c = (1, 3), x = 0, one local step of 0.5: (0.5, 1.5), xbar 1, mix 0.25: (0.625, 1.375).  Then 0.5 of the way to
    c: (0.8125, 2.1875), xbar 1.5, mixed (0.984375, 2.015625)."""
    e = points([[1], [3]], lr=0.5)
    m = play(e, L2GD(mix=0.25, steps="epochs"))
    close(deployed(e, m), column(0.625, 1.375))
    play(e, m, begin=1)
    close(deployed(e, m), column(0.984375, 2.015625))


def test_an_iteration_is_on_average_a_step_down_the_objective() -> None:
    """Both outcomes of the coin, by their chances, make x - alpha grad F, with lam = N pr c / alpha: at N = 3,
    pr = 0.2, c = 0.3, alpha 0.12 local steps are of 0.12 / (3 * 0.8) = 0.05, and lam = 1.5."""
    n, pr, c, alpha = 3, 0.2, 0.3, 0.12
    targets, start = column(1.0, 3.0, 8.0), column(0.5, -1.0, 2.0)

    def outcome(lr: float, **options: Any) -> Tensor:
        e = points(targets.tolist(), lr=lr)
        m = play(e, L2GD(pr=pr, steps="epochs", **options), rounds=0)
        m.x[np.arange(n)] = m.uploaded[np.arange(n)] = start
        return deployed(e, play(e, m, begin=1))

    expected = (1 - pr) * outcome(alpha / (n * (1 - pr)), mix=0.0) + pr * outcome(1e-30, mix=c)
    x = start.clone().requires_grad_()
    lam = n * pr * c / alpha
    F = (0.5 * (x - targets).square()).sum() / n + lam / (2 * n) * (x - x.mean()).square().sum()
    close(expected, start - alpha * torch.autograd.grad(F, x)[0])


def test_averaging_leaves_the_mean_and_shrinks_deviations() -> None:
    """A step of rate 0 and mix 0.3: the mean stays, what differs from it is 0.7 of what it was."""
    e = six_clients()
    m = play(e, L2GD(mix=0.3, steps="epochs"), rounds=0)
    everybody = np.arange(6)
    m.x[everybody] = m.uploaded[everybody] = torch.randn(6, e.model.size, generator=torch.Generator().manual_seed(0))
    before = m.x[everybody].clone()
    e.optimizer.lr = 1e-30
    m.round(Cohort(e, everybody, 0))
    after = m.x[everybody]
    close(after.mean(0), before.mean(0), 1e-6)
    close(after - after.mean(0), 0.7 * (before - before.mean(0)), 1e-6)


def test_without_mixing_it_is_local_at_equal_steps() -> None:
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a = deployed(e, play(e, L2GD(mix=0.0, steps="epochs"), 3, COHORTS))
    equal(a, deployed(f, play(f, Local(), 3, COHORTS)))


def test_drawn_runs_are_so_many_steps_of_local_training() -> None:
    e, f = six_clients(epochs=4), six_clients(epochs=4)
    m = play(e, L2GD(pr=0.3, mix=0.0), 3, COHORTS)
    local = play(f, Local(), rounds=0)
    for r, ids in enumerate(COHORTS):
        cohort = Cohort(f, np.array(ids), r)
        steps = L2GD(pr=0.3).run_length(cohort)
        how = LocalTraining(steps=steps, uploaded=False)
        local.theta[cohort.ids] = cohort.train(local.theta[cohort.ids], how=how).theta
    equal(deployed(e, m), deployed(f, local))


def test_averaging_steps_without_local_ones_before_cost_nothing() -> None:
    """pr = 0.5: of 12 rounds those with a local step send a row up and one down for each of the 6 clients."""
    e = six_clients(epochs=4)
    m = play(e, L2GD(pr=0.5), rounds=0)
    runs, row = [], 4 * 6 * e.model.size
    for r in range(12):
        cohort = Cohort(e, np.arange(6), r)
        before, runs = m.x[cohort.ids].clone(), [*runs, m.run_length(cohort)]
        m.round(cohort)
        assert (cohort.cost.bytes_up, cohort.cost.bytes_down) == ((row, row) if runs[-1] else (0, 0))
        if not runs[-1]:
            close(m.x[cohort.ids], before.lerp(before.mean(0), m.mix))  # and it is an averaging step
    assert runs.count(0) == 5


def test_a_cohort_that_does_not_know_its_mean_is_sent_it() -> None:
    e = six_clients(epochs=4)
    m = play(e, L2GD(pr=0.5), rounds=0)
    row = 4 * e.model.size
    idle = [r for r in range(40) if not m.run_length(Cohort(e, np.arange(6), r))][:3]
    for r, ids, down in zip(idle, ([0, 1, 2], [0, 1, 2], [0, 1, 3]), (3 * row, 0, 3 * row)):
        cohort = Cohort(e, np.array(ids), r)
        m.round(cohort)
        assert (cohort.cost.bytes_up, cohort.cost.bytes_down) == (0, down)


def test_lengths_of_runs_are_geometric_and_bounded() -> None:
    e = six_clients(epochs=40)
    lengths = np.array([L2GD(pr=0.25).run_length(Cohort(e, np.arange(6), r)) for r in range(4000)])
    assert lengths.min() == 0 and abs(lengths.mean() - 3) < 0.2  # (1 - pr) / pr
    assert abs((lengths == 0).mean() - 0.25) < 0.03
    e = six_clients(epochs=1)
    cohort = Cohort(e, np.arange(6), 0)
    assert max(L2GD(pr=0.01).run_length(Cohort(e, np.arange(6), r)) for r in range(100)) == cohort.max_local_steps


def test_full_mixing_ends_in_one_model() -> None:
    e = six_clients()
    rows = deployed(e, play(e, L2GD(mix=1.0, steps="epochs"), 2))
    close(rows, rows[:1].expand(6, -1), 1e-6)


def test_the_servers_copies_are_made_of_what_clients_saw() -> None:
    """At mix = 1 a client's row is the mean as it saw it, to which its next upload adds; compressed both ways."""
    e = six_clients()
    e = replace(e, compression=Compression(TopK(0.25, direction="both"), e.rows, e.model, e.seed))
    m = play(e, L2GD(mix=1.0, steps="epochs"), 3)
    everybody = np.arange(6)
    equal(m.uploaded[everybody], m.x[everybody])


@pytest.mark.parametrize("options, words", [({"pr": 0.0}, r"algorithm\.pr=0")])
def test_what_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        L2GD(**options)
