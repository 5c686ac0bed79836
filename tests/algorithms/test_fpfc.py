"""FPFC: its penalty, a round by hand, invariants of ADMM, and its limits."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, column, points, six_clients
from scipy.optimize import minimize_scalar
from tiny import all_clients, close, deployed, equal, play
from torch import Tensor

from fedbench.algorithms.fpfc import FPFC
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort


def penalty(t: float, lam: float, a: float, xi: float) -> float:
    """SCAD whose corner at 0 is a quadratic within xi."""
    if t <= xi:
        return lam * t * t / (2 * xi)
    inner = lam * xi / 2 - lam * xi  # continuous at xi
    if t <= lam:
        return lam * t + inner
    if t <= a * lam:
        return (2 * a * lam * t - t * t - lam * lam) / (2 * (a - 1)) + inner
    return lam * lam * (a + 1) / 2 + inner


@pytest.mark.parametrize("rho, lam, a, xi", [(1.0, 0.6, 3.7, 1e-2), (2.0, 0.6, 3.7, 1e-2), (1.0, 2.0, 5.0, 0.5)])
def test_s_minimizes_the_penalty_and_half_the_squared_distance(rho: float, lam: float, a: float, xi: float) -> None:
    m = FPFC(lam, rho, a, xi)
    for n in [0.3 * xi, xi, 0.9 * (xi + lam / rho), lam + 0.9 * lam / rho, 0.9 * a * lam, 1.5 * a * lam]:
        t = float(m.scad(torch.tensor([n], dtype=torch.float64))) * n

        def value(t: float, n: float = n) -> float:
            return rho / 2 * (n - t) ** 2 + penalty(t, lam, a, xi)

        grid = np.linspace(0, 1.2 * n, 400)
        near = grid[np.argmin([value(x) for x in grid])]
        best = minimize_scalar(value, bounds=(max(near - n / 50, 0), near + n / 50), method="bounded")
        assert value(t) <= best.fun + 1e-9


@pytest.mark.parametrize("rho, lam, a, xi", [(1.0, 0.6, 3.7, 1e-2), (2.0, 0.6, 3.7, 1e-2), (1.0, 2.0, 5.0, 0.5)])
def test_s_is_continuous(rho: float, lam: float, a: float, xi: float) -> None:
    m = FPFC(lam, rho, a, xi)
    for n in (xi + lam / rho, lam + lam / rho, a * lam):
        below, above = m.scad(torch.tensor([n * (1 - 1e-9), n * (1 + 1e-9)], dtype=torch.float64))
        assert abs(float(below - above)) < 1e-6


def dense(m: FPFC, w: Tensor, theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """zeta, theta and v of all ordered pairs [N, N, p], as the box has them."""
    zeta = (w[None] + theta - v / m.rho).mean(1)
    delta = w[:, None] - w[None] + v / m.rho
    s = m.scad(delta.norm(dim=2).clamp_min(1e-30))[..., None]
    theta = s * delta
    return zeta, theta, v + m.rho * (w[:, None] - w[None] - theta)


@pytest.mark.parametrize("lam, rho", [(0.6, 1.0), (0.05, 2.0), (5.0, 1.0)])
def test_pairs_are_the_boxs_theta_and_v(lam: float, rho: float) -> None:
    """Three updates of all pairs against tensors [N, N, p]; theta and v are antisymmetric, zetas have the ws' mean."""
    e = points([[1.0, 2.0]] * 5, start=[0.0, 0.0])
    m = play(e, FPFC(lam, rho, xi=1e-3), rounds=0)
    g = torch.Generator().manual_seed(0)
    theta = v = torch.zeros(5, 5, 2)
    for _ in range(3):
        w = torch.randn(5, 2, generator=g)
        m.W = w
        m.fuse(np.arange(5))
        _, theta, v = dense(m, w, theta, v)
        delta, s = m.all_pairs(), m.s
        for i, later, at in m.pairs():
            close(s[at][:, None] * delta[at], theta[i, later], 1e-5)
            close(rho * (1 - s[at])[:, None] * delta[at], v[i, later], 1e-5)
        close(theta, -theta.transpose(0, 1), 1e-5)
        close(v, -v.transpose(0, 1), 1e-5)
        close(m.zeta(), (w[None] + theta - v / rho).mean(1), 1e-5)
        close(m.zeta().sum(0), w.sum(0), 1e-5)


@pytest.mark.parametrize("partial", [None, 1])
def test_one_vector_a_client_says_what_one_a_pair_says(partial: int | None) -> None:
    """Models drift apart: all pairs are near at first, then they differ.  partial: a round that two clients miss."""
    short, long = (play(points([[1.0] * 3] * 5), FPFC(0.6, rho=0.5, a=4.0, xi=1e-3), rounds=0) for _ in range(2))
    long.delta = long.all_pairs()
    assert short.one_s and not long.one_s and long.delta.shape == (10, 1)
    g, were = torch.Generator().manual_seed(0), []
    towards = torch.randn(5, 1, generator=g)
    for t in range(8):
        ids = np.array([0, 2, 3]) if t == partial else np.arange(5)
        for m in (short, long):
            m.W = 0.1 * (t + 1) * towards + 3
            m.fuse(ids)
        close(short.all_pairs(), long.delta, 1e-5)
        close(short.s, long.s, 1e-5)
        close(short.zeta(), long.zeta(), 1e-5)
        equal(short.clusters(0.1), long.clusters(0.1))
        were.append(short.one_s)
    assert were[:2] == [True, partial is None] and not were[-1]
    assert were == sorted(were, reverse=True), "it never goes back"


def test_only_pairs_with_the_cohort_move() -> None:
    e = six_clients()
    m = play(e, FPFC(0.1, xi=1e-3), 2)
    before, s = m.all_pairs().clone(), m.s.clone()
    m.W = m.W + torch.randn(m.W.shape, generator=torch.Generator().manual_seed(0))
    m.fuse(np.array([1, 4]))
    everybody = play(six_clients(), FPFC(0.1, xi=1e-3), rounds=0)
    everybody.W, everybody.delta, everybody.s = m.W, before, s
    everybody.fuse(np.arange(6))
    number = 0
    for i in range(6):
        for j in range(i + 1, 6):
            expected = everybody if {i, j} & {1, 4} else None
            equal(m.delta[number], before[number] if expected is None else expected.delta[number])
            equal(m.s[number], s[number] if expected is None else expected.s[number])
            number += 1


def test_a_round_by_hand() -> None:
    """Two clients, c = (1, 3), w = 0: zeta = 0, a step of 0.25 on (w - c)^2/2 + w^2/2: (0.25, 0.75).  delta = -0.5 is
    within xi + lam / rho = 0.7: s = 0.1 / (0.6 + 0.1) = 1/7, theta = -1/14, v = -3/7.  Then
    zeta_0 = (w_0 + w_1 + theta - v) / 2 = (1 - 1/14 + 3/7) / 2 = 19/28, zeta_1 = 9/28;
    w_0 = 0.25 - 0.25 (0.25 - 1 + 0.25 - 19/28), w_1 = 0.75 - 0.25 (0.75 - 3 + 0.75 - 9/28)."""
    e = points([[1], [3]], lr=0.25)
    m = play(e, FPFC(0.6, 1.0, 3.7, 0.1))
    close(deployed(e, m), column(0.25, 0.75))
    close(m.s * m.delta[:, 0], torch.tensor([-1 / 14]))
    close(m.zeta(), column(19 / 28, 9 / 28))
    play(e, m, begin=1)
    close(deployed(e, m), column(0.25 + 0.25 * (0.5 + 19 / 28), 0.75 + 0.25 * (1.5 + 9 / 28)))


def test_clients_are_pulled_to_zeta_by_rho() -> None:
    """c = (1, 3), w = zeta = 0, rho = 2, two steps of 0.25: 0.25 c, then 0.25 c - 0.25 (0.25 c - c + 2 * 0.25 c)."""
    e = points([[1], [3]], lr=0.25, epochs=2)
    close(deployed(e, play(e, FPFC(0.6, rho=2.0, xi=0.1))), column(0.3125, 0.9375))


def test_without_a_penalty_nobody_changes_anybody_else() -> None:
    """Bit for bit, whatever the others' data are; each is pulled to its own last model, and v is 0."""
    a, b = points([[1], [3], [5]], epochs=2), points([[1], [-7], [100]], epochs=2)
    m, n = play(a, FPFC(0.0), 4), play(b, FPFC(0.0), 4)
    equal(deployed(a, m)[0], deployed(b, n)[0])
    equal(m.zeta(), m.W)
    assert bool((m.s == 1).all())


def test_two_populations_fuse_within_and_not_across() -> None:
    """lam 0.6 and a lam = 2.2: what is 8 apart lets go, what is near becomes one."""
    g = np.random.default_rng(0)
    e = points([g.normal(c, 0.1, 8) for c in (-4.0, -4.0, -4.0, 4.0, 4.0)], lr=0.2, epochs=5)
    m = play(e, FPFC(0.6, merge=1e-3), 200)
    rows = deployed(e, m, 199, True)[:, 0]
    label = m.clusters(1e-3)
    equal(label, torch.tensor([0, 0, 0, 1, 1]))
    assert float(rows[:3].std()) < 1e-5 and float(rows[3:].std()) < 1e-5
    assert math.isclose(float(rows[0]), -4, abs_tol=0.2) and math.isclose(float(rows[3]), 4, abs_tol=0.2)
    own = deployed(e, m, 198, False)[:, 0]
    assert float((own - rows).abs().max()) < 0.2 and not torch.equal(own, rows)
    close(m.initial_rows_for_new_clients(all_clients(e), []), m.means(label)[label], 1e-6)


@pytest.mark.parametrize("weights, mean", [("samples", (1 + 3 * 5) / 4), ("uniform", (1 + 5) / 2)])
def test_a_cluster_deploys_its_mean_by_samples(weights: Any, mean: float) -> None:
    """One cluster of clients with 1 and 3 samples, at 1 and 5: their mean is 4; the third, far away, stays at 90."""
    e = dataclasses.replace(points([[1], [5, 5, 5], [90]]), client_weights=weights)
    m = play(e, FPFC(0.6, merge=1.0), rounds=0)
    m.round(cohort := Cohort(e, np.arange(3), 0))
    m.W = column(1.0, 5.0, 90.0)
    m.personal[np.arange(3)] = m.W
    m.delta, m.s = torch.tensor([[0.5], [89.0], [85.0]]), torch.ones(3)
    close(deployed(e, m, 0, True), column(mean, mean, 90.0))
    assert cohort.cost.takes_means  # client_weights=uniform is used


def test_running_statistics_and_the_others_rows_stay_with_the_client() -> None:
    e = six_clients()
    m = play(e, FPFC(0.6), 2, COHORTS)
    before = m.personal[np.arange(6)].clone()
    m.round(Cohort(e, np.array([2]), 2))
    after = m.personal[np.arange(6)]
    assert not torch.equal(after[2], before[2])
    equal(after[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"a": 2.0}, r"a=2 must be more than 1 \+ 1 / algorithm\.rho = 2"),
        ({"xi": 1.0}, r"xi=1 must be positive and at most"),
    ],
)
def test_what_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FPFC(**options)
