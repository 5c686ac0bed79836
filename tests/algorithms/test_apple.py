"""APPLE: rounds by hand, gradients by finite differences, downloaded cores, and saved state."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COHORTS, Normed, again, column, points, row, six_clients
from tiny import (
    SIZES,
    all_clients,
    close,
    compose,
    deployed,
    engine,
    equal,
    mlp,
    play,
    ragged,
    seeded,
)
from torch import Tensor, nn

from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.local import Local
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, simulator


def apple_by_hand(
    c: Sequence[float],
    core: list[float],
    d: list[list[float]],
    q: Sequence[float],
    lr: float,
    eta2: float,
    pull: float,
    momentum: float,
    steps: int,
) -> tuple[list[float], list[list[float]]]:
    """Cores and D after a round of full-batch steps: everybody uses the old cores of the others."""
    new, n = list(core), len(core)
    for i in range(n):
        mine, v_c, v_d = core[i], 0.0, [0.0] * n
        for _ in range(steps):
            held = [mine if j == i else core[j] for j in range(n)]
            g = sum(d[i][j] * held[j] for j in range(n)) - c[i]
            v_c = momentum * v_c + d[i][i] * g
            v_d = [momentum * v_d[j] + g * held[j] + pull * (d[i][j] - q[j]) for j in range(n)]
            mine -= lr * v_c
            d[i] = [d[i][j] - eta2 * v_d[j] for j in range(n)]
        new[i] = mine
    return new, d


@pytest.mark.parametrize("momentum, steps", [(0.0, 1), (0.9, 3)])
def test_apple_by_hand(momentum: float, steps: int) -> None:
    """c = (1, 3, 2), cores (1, 2, -1), n = (1, 2, 1), so q = (1/4, 1/2, 1/4) = d_i.  All start from w = 1; gradients
    (0, -2, -1).  One step, lr 0.2, eta2 0.1:  cores 1, 2 + 0.2 x 0.5 x 2 = 2.2, -1 + 0.2 x 0.25 = -0.95;
    d_1 = q + 0.1 x 2 (1, 2, -1) = (0.45, 0.9, 0.05), d_2 = q + 0.1 (1, 2, -1) = (0.35, 0.7, 0.15).  The penalty is 0
    at q, and from the second step 2 mu (d - q).  Further steps and rounds as in apple_by_hand.
    """
    c, q, core = (1.0, 3.0, 2.0), [0.25, 0.5, 0.25], [1.0, 2.0, -1.0]
    pull = 2 * 0.3
    by_hand = partial(apple_by_hand, c, q=q, lr=0.2, eta2=0.1, momentum=momentum, steps=steps)
    if steps == 1:
        new, d = by_hand(core, [list(q) for _ in c], pull=pull)
        assert np.allclose(new, [1, 2.2, -0.95]) and np.allclose(d, [q, [0.45, 0.9, 0.05], [0.35, 0.7, 0.15]])
    e = points([[1.0], [3.0, 3.0], [2.0]], lr=0.2, momentum=momentum, epochs=steps, rounds=4)
    a = play(e, APPLE(mu=0.3, eta2=0.1, fraction=0.5), rounds=0)
    a.exchange.cores = column(*core)
    d = [list(q) for _ in c]
    for r in range(3):  # lambda = 1, 1e-3^(1/2), 0
        old = list(core)
        core, d = by_hand(core, d, pull=pull * (1, 1e-3**0.5, 0)[r])
        again(e, a, r)
        close(a.exchange.cores, column(*core))
        close(a.d[np.arange(3)], torch.tensor(d))
        mixed = [sum(d[i][j] * (core if i == j else old)[j] for j in range(3)) for i in range(3)]
        close(deployed(e, a), column(*mixed))  # the others' cores as downloaded


def test_apple_gradients_by_finite_differences() -> None:
    """One full-batch step at rates 1: the moves are minus the gradients of f_i(sum_j d_ij c_j) in c_i and d_i."""
    e = six_clients(SGD(lr=1.0), batch_size=100)
    a = play(e, APPLE(mu=0.0, eta2=1.0), rounds=0)
    cores, d, i = a.exchange.cores.double(), torch.linspace(-0.2, 0.5, 6).double(), 3
    a.d[np.arange(6)] = d.float().expand(6, -1)
    x, y = e.federation.gather(torch.from_numpy(e.federation.splits["train"][i]))

    def loss(cores: Tensor, d: Tensor) -> float:
        return float(nn.functional.cross_entropy(e.model.forward(d @ cores, x.double()), y))

    direction = torch.from_numpy(np.random.default_rng(0).normal(size=e.model.size))
    step = torch.zeros_like(cores)
    step[i] = 1e-5 * direction
    slope = (loss(cores + step, d) - loss(cores - step, d)) / 2e-5
    slopes = [(loss(cores, d + 1e-5 * k) - loss(cores, d - 1e-5 * k)) / 2e-5 for k in torch.eye(6).double()]
    again(e, a, 0)
    assert math.isclose(float((cores[i] - a.exchange.cores[i]) @ direction), slope, rel_tol=1e-4)
    close(d.float() - a.d[np.array([i])][0], torch.tensor(slopes), 1e-4)


def common(a: APPLE) -> APPLE:
    """All cores start from one draw."""
    a.exchange.cores = a.core.default.repeat(len(a.exchange.cores), 1)
    return a


@pytest.mark.parametrize("bandwidth", [None, 2])
def test_apple_with_itself_only_is_local(bandwidth: int | None) -> None:
    """D = I, frozen; kept momentum included."""
    e, f = (six_clients(SGD(lr=0.1, momentum=0.9, reset="never"), epochs=2) for _ in range(2))
    a = common(play(e, APPLE(eta2=0.0, bandwidth=bandwidth), rounds=0))
    a.d[np.arange(6)] = torch.eye(6)
    play(e, a, 3, COHORTS, begin=1)
    b = play(f, Local(), rounds=0)
    play(f, b, 3, COHORTS, begin=1)
    close(deployed(e, a)[[0, 1, 2, 3, 4, 5]], deployed(f, b), 1e-6)


def test_apple_frozen_at_shares_is_fedsgd() -> None:
    """D = q, one core for all, one full-batch step: the next mixture is w - lr sum_j q_j^2 grad f_j."""
    e = six_clients(SGD(lr=0.1), batch_size=100)
    a = common(play(e, APPLE(eta2=0.0), rounds=0))
    play(e, a, begin=1)
    w = e.model.init_row()
    grads = all_clients(e).gradient(w)[0]
    close(a.q @ a.exchange.cores, w - 0.1 * a.q**2 @ grads, 1e-6)


def test_apple_is_unmoved_by_those_it_gives_no_weight() -> None:
    """d_ij = 0 for j != i = 0 and eta2 = 0: other data, other rows of D, the same client 0."""
    runs = []
    for change in (0, 1):
        e = six_clients()
        f = e.federation
        others = f.splits["train"].indices[f.splits["train"].offsets[1] :]
        f.targets[torch.from_numpy(others)] = (f.targets[torch.from_numpy(others)] + change) % 3
        a = play(e, APPLE(eta2=0.0), rounds=0)
        a.d[np.array([0])] = row(0.7, 0, 0, 0, 0, 0)[None]
        play(e, a, 3, begin=1)
        runs.append(deployed(e, a))
    equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("scheduler, middle", [("exponential", 1e-3**0.5), ("cosine", 0.5)])
def test_apple_scheduler(scheduler: Any, middle: float) -> None:
    """T = 80, over the first quarter: from 1 at round 0 down, 0 from round 20 on."""
    strength = [APPLE(scheduler=scheduler, fraction=0.25).strength(r, 80) for r in range(80)]
    assert strength[0] == 1 and math.isclose(strength[10], middle)
    assert all(a > b for a, b in pairwise(strength[:21]))
    assert strength[20:] == [0.0] * 60
    assert APPLE().strength(15, 160) > 0 == APPLE().strength(16, 160)
    assert APPLE(fraction=0.29).strength(28, 100) > 0 == APPLE(fraction=0.29).strength(29, 100)  # 28.999999999999996
    assert APPLE(fraction=0.0).strength(0, 160) == 0


def test_apple_without_penalty_needs_no_scheduler() -> None:
    e, f, g = six_clients(), six_clients(), six_clients()
    rows = [
        deployed(x, play(x, APPLE(mu=mu, eta2=0.05, scheduler=s, fraction=1.0), 3))
        for x, mu, s in ((e, 0.0, "exponential"), (f, 0.0, "cosine"), (g, 1.0, "cosine"))
    ]
    equal(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2], atol=1e-4)


def test_apple_rates_follow_the_schedule() -> None:
    """Both do: at half the rates from round 1 on, a step from the same state goes half as far."""
    schedules = ({"name": "constant"}, {"name": "exponential", "gamma": 0.5})
    moves = []
    for schedule in schedules:
        e = replace(points([[1.0], [3.0]], lr=0.2), optimizer=SGD(lr=0.2, schedule=schedule))
        a = play(e, APPLE(eta2=0.1), rounds=0)
        a.exchange.cores = column(1.0, 2.0)
        again(e, a, 1)
        moves.append(torch.cat([a.exchange.cores.T - row(1, 2), a.d[np.arange(2)] - a.q]))
    close(moves[1], 0.5 * moves[0])


def test_apple_starts_from_independent_cores() -> None:
    e = six_clients()
    a = play(e, APPLE(), rounds=0)
    for j in range(6):
        close(a.exchange.cores[j], FlatModel(mlp(seed=j + 1)).init_row(), 0)
    close(deployed(e, a), (a.q @ a.exchange.cores).expand(6, -1), 1e-6)
    close(a.q, torch.tensor(SIZES) / sum(SIZES), 1e-6)


def test_independent_cores_come_from_the_seed() -> None:
    """Two builds of one config draw the same rows, in which only what is initialized at random differs."""
    cfg = compose(
        ["model=resnet", "hardware=cpu", "hardware.executor=vmap", "partition=iid", "partition.num_clients=3"]
    )
    arrays = build.data(cfg)
    models = [build.engine(cfg, arrays, build.partition(cfg, arrays)).model for _ in range(2)]
    rows = models[0].init_rows(2)
    equal(rows, models[1].init_rows(2))
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], models[0].init_row())
    buffers = models[0].trained.rest(models[0].size)
    equal(buffers.take(rows), buffers.take(models[0].init_row()).expand(2, -1))
    clusters = models[0].init_rows(2, "clusters")
    equal(clusters, models[1].init_rows(2, "clusters"))
    assert not any(torch.equal(c, row) for c in clusters for row in rows)
    with pytest.raises(ValueError, match="new_module of FlatModel"):
        FlatModel(mlp()).init_rows(2)


def test_apple_keeps_batch_statistics_its_own() -> None:
    """Weights of either sign mix the trained columns only: variances stay positive, and the core carries its own."""
    arrays, split = ragged()
    model = FlatModel(seeded(Normed), new_module=lambda j: seeded(Normed, j + 1))
    e = engine(arrays, split, model, SGD(lr=0.05), drop_last=True)  # type: ignore[arg-type]
    a = play(e, APPLE(), rounds=0)
    a.d[np.arange(6)] = torch.linspace(-1, 1, 36).view(6, 6)
    play(e, a, 2, begin=1)
    a_, b_ = model.spans["body.2.running_var"]
    assert (deployed(e, a)[:, a_:b_] > 0).all()
    buffers = model.trained.rest(model.size)
    equal(buffers.take(a.exchange.cores), buffers.take(deployed(e, a)))
    assert not torch.equal(buffers.take(a.exchange.cores)[0], buffers.take(model.init_row()))


def test_apple_with_full_bandwidth_is_unlimited() -> None:
    e, f = six_clients(epochs=2), six_clients(epochs=2)
    a, b = play(e, APPLE(eta2=0.05, bandwidth=5), 3, COHORTS), play(f, APPLE(eta2=0.05), 3, COHORTS)
    close(deployed(e, a), deployed(f, b), 1e-6)
    close(a.exchange.cores[a.exchange.newest], b.exchange.cores, 1e-6)


def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Which cores each client of a cohort downloads, [K, N] bool, a cohort after the other from now on."""
    picked: list[Tensor] = []
    fetch = Cohort.fetch
    monkeypatch.setattr(Cohort, "fetch", lambda c, which, **rows: picked.append(which) or fetch(c, which, **rows))
    return picked


def test_apple_keeps_stale_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's version of a core is that of the start of the round in which it last chose it, or first took part."""
    e = six_clients()
    a = play(e, APPLE(bandwidth=2), rounds=0)
    stale: dict[int, Tensor] = {}
    picked = downloads(monkeypatch)
    for r in range(8):
        ids = [0, 1, 2, 3, 4, 5] if r % 2 else [(r + k) % 6 for k in (0, 1, 2)]
        now = a.exchange.cores[a.exchange.newest].clone()
        again(e, a, r, sorted(ids))
        for i, which in zip(sorted(ids), picked[-1]):
            assert which.sum() == (2 if i in stale else 5) and not which[i]
            stale[i] = torch.where(which[:, None], now, stale.get(i, now))
        for i, expected in stale.items():
            others = [j for j in range(6) if j != i]
            equal(a.exchange.cores[a.exchange.held[i]][others], expected[others])
        assert (
            len(a.exchange.cores)
            == len(torch.cat([a.exchange.held[a.exchange.held >= 0], a.exchange.newest]).unique())
            <= 6 * 7
        )


def test_apple_downloads_the_unseen_first_then_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """intended: after the first round, M = 2 of five others: all five within three rounds; then those of large |d_ij|
    more often, base^|d| = 1.5^4 = 5.1 times as probable.  uniform: alike throughout."""
    shares = {}
    for selection in ("intended", "uniform"):
        e = six_clients()
        a = play(e, APPLE(bandwidth=2, selection=selection))
        own = torch.eye(6, dtype=torch.bool)
        a.d[np.arange(6)] = row(-4, 0, 0, 0, 0, 0).expand(6, -1)
        picked = downloads(monkeypatch)
        for r in range(1, 200):
            a.exchange.download(all_clients(e, r, f"pick {r}"), a.d[np.arange(6)])
        picks = torch.stack(picked)  # [rounds, 6, 6]
        assert (picks.sum(2) == 2).all() and not (picks & own).any()
        if selection == "intended":
            assert (picks[:3].any(0) | own).all() and (picks[:2].sum(0) <= 1).all()
        shares[selection] = picks[3:, 1:].float().mean((0, 1))  # how often clients 1.. chose each
    assert shares["intended"][0] > 0.7 and (shares["intended"][1:] < 0.35).all()
    assert 0.35 < shares["uniform"][0] < 0.45


def test_apple_states_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cores of 163 numbers take 4,056 bytes with D; six clients' versions and the newest ones seven times that."""
    monkeypatch.setattr("fedbench.algorithms.apple.free_memory", lambda device: 4_056)
    play(six_clients(), APPLE(), rounds=0)
    with pytest.raises(ConfigError, match=r"42 of 163 numbers for 6 clients take .* KiB"):
        play(six_clients(), APPLE(bandwidth=2), rounds=0)
    monkeypatch.setattr("fedbench.algorithms.apple.free_memory", lambda device: 4_055)
    with pytest.raises(ConfigError, match=r"6 of 163 numbers for 6 clients take"):
        play(six_clients(), APPLE(), rounds=0)


def test_apple_resumes_with_kept_momentum(tmp_path: Path) -> None:
    """The optimizer's buffers of D are N wide, those of the cores P."""
    cfg = compose(
        [
            "algorithm=apple",
            "algorithm.bandwidth=2",
            "optimizer.momentum=0.9",
            "optimizer.reset=never",
            "partition=iid",
            "partition.num_clients=4",
            "local.epochs=1",
            "local.batch_size=64",
            "hardware=cpu",
            "sample_rate=0.5",
            "hardware.executor=vmap",
        ]
    )
    sim = simulator.prepare(cfg, tmp_path, None)
    play(sim.engine, sim.algorithm, 2, [[0, 1], [1, 3]], begin=1)
    sim.done = 2
    other = simulator.prepare(cfg, tmp_path, sim.state())
    assert {n: s.default.shape[0] for n, s in other.engine.rows.all.items() if "optimizer" in n} == {
        "optimizer/core/momentum": sim.engine.model.size,
        "optimizer/d/momentum": 4,
    }
    for s in (sim, other):
        play(s.engine, s.algorithm, 2, [[1, 2], [0, 3]], begin=3)
    equal(deployed(other.engine, other.algorithm), deployed(sim.engine, sim.algorithm))
