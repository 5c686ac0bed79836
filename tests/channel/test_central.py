"""Central differential privacy: accounting equals dp-accounting, noise and clip as stated, no other way out."""

from __future__ import annotations

import copy
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from cases import METHODS, case, set_up
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from tiny import HEAD, engine, mlp, ragged

import fedbench
from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.fedavg import FedAvg
from fedbench.channel import accounting
from fedbench.channel.accounting import Setting
from fedbench.channel.calibration import epsilon_of
from fedbench.channel.central import CentralPrivacy, clipped_sum
from fedbench.channel.sealed import Sealed, find_sealed
from fedbench.core.options import ConfigError, RunError
from fedbench.core.rows import RowStore
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.simulation import build, simulator
from fedbench.testing.algorithm import other_data
from fedbench.testing.privacy import audit, lower_bound

SMALL = ("dataset.subset=0.2", "partition.num_clients=6", "model.hidden=[4]", "local.epochs=1", "rounds=3")
REFUSAL = "privacy=central"
SLOW = pytest.mark.slow


def central(e: Engine, expected: float | None = None, rounds: int = 4, **options: Any) -> Engine:
    n = e.federation.num_clients
    options = {"noise_multiplier": 1.0, "delta": 1e-2, **options}
    return replace(
        e, client_weights="uniform", central=CentralPrivacy(e.rows, n, float(expected or n), rounds, **options)
    )


def net(**options: Any) -> Engine:
    return engine(*ragged(), mlp(), columns=HEAD, **options)


def released(e: Engine, rows: torch.Tensor, round: int = 0, w: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of rows [K, n] of the first K clients, as changes of w (default: 0)."""
    cohort = Cohort(e, np.arange(len(rows)), round)
    w = torch.zeros(rows.shape[1]) if w is None else w
    up = cohort.upload(theta=rows + cohort.broadcast(w=w).w, relative_to={"theta": "w"})
    return cohort.mean(up.theta, updates="w")


# -- accounting ------------------------------------------------------------------------------------------
def settings() -> list[tuple[Setting, int]]:
    """100 settings of z, q, rounds, delta, sampling, accountant and m."""
    draw = np.random.default_rng(0)
    found = []
    for i in range(100):
        fixed, n = i % 4 == 3, int(draw.integers(20, 2000))
        k = max(1, round(n * float(draw.choice([0.01, 0.05, 0.2]))))
        z, delta = float(draw.uniform(0.8, 5)), float(10.0 ** -draw.integers(3, 8))
        kind = ("fixed", "rdp") if fixed else ("poisson", "rdp" if i % 2 else "pld")
        found.append((Setting(z, n, float(k), int(draw.integers(1, 4)), *kind, delta), int(draw.integers(1, 200))))
    return found


@pytest.mark.parametrize(
    "part", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_epsilon_is_that_of_the_library(part: int) -> None:
    for s, rounds in settings()[part::4]:
        gaussian = GaussianDpEvent(s.noise_multiplier / s.releases**0.5 / (2 if s.sampling == "fixed" else 1))
        if s.sampling == "fixed":
            event = SampledWithoutReplacementDpEvent(s.num_clients, int(s.expected), gaussian)
            counted = dp_accounting.rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        else:
            event = PoissonSampledDpEvent(s.expected / s.num_clients, gaussian)
            counted = dp_accounting.pld.PLDAccountant() if s.accountant == "pld" else dp_accounting.rdp.RdpAccountant()
        counted.compose(event, rounds)
        assert accounting.epsilon(s, rounds) == pytest.approx(counted.get_epsilon(s.delta), abs=1e-6), s


@pytest.mark.parametrize(
    "kind, expected, releases",
    [
        pytest.param(("poisson", "pld"), 10.0, 1, marks=SLOW),
        (("poisson", "rdp"), 5.5, 2),
        (("fixed", "rdp"), 10.0, 1),
        pytest.param(("fixed", "pld"), 100.0, 3, marks=SLOW),
    ],
)
@pytest.mark.parametrize("target", [0.5, pytest.param(4.0, marks=SLOW)])
def test_the_multiplier_of_a_target_is_the_smallest(
    kind: tuple[Any, Any], expected: float, releases: int, target: float
) -> None:
    s = Setting(0.0, 100, expected, releases, *kind, 1e-5)
    z = accounting.least_noise_multiplier(s, target, 20)
    assert accounting.epsilon(replace(s, noise_multiplier=z), 20) <= target
    assert accounting.epsilon(replace(s, noise_multiplier=z * (1 - 2 * accounting.TOLERANCE)), 20) > target


@pytest.mark.parametrize("sampling, moved", [("poisson", 1), ("fixed", 2)])
@pytest.mark.parametrize("kind, slack", [("pld", 0.01), ("rdp", 0.1)])
def test_rounds_of_all_clients_are_gaussian_releases(sampling: Any, moved: int, kind: Any, slack: float) -> None:
    """10 rounds of 3 releases of a sum that one client moves by 1 or 2 clips, and the noise z = 4, exactly (Balle)."""
    exact = epsilon_of(10 * 3 * moved**2 / (2 * 4**2), 1e-5)
    assert exact < accounting.epsilon(Setting(4.0, 100, 100.0, 3, sampling, kind, 1e-5), 10) < (1 + slack) * exact


def test_no_rounds_spend_nothing_and_no_noise_everything() -> None:
    s = Setting(1.0, 100, 10.0, 1, "poisson", "rdp", 1e-5)
    assert accounting.epsilon(s, 0) == 0 and accounting.epsilon(replace(s, noise_multiplier=0.0), 1) == math.inf


# -- releases --------------------------------------------------------------------------------------------
def test_noise_has_mean_zero_and_the_stated_deviation() -> None:
    """z C / (q N): 40,000 numbers, a deviation within 1.5 %, a mean within 4 standard errors, new in each round."""
    e = central(net(), expected=3.0, noise_multiplier=1.5, clip=2.0)
    rows = torch.zeros(4, 40_000)
    a, b = released(e, rows), released(e, rows, 1)
    for noise in (a, b):
        z = noise / (1.5 * 2 / 3)
        assert float(z.std()) == pytest.approx(1, rel=0.015) and abs(float(z.mean())) < 0.02
        assert abs(float(z.pow(3).mean())) < 0.06 and float(z.pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.025
    assert torch.equal(released(e, rows), a), "a resumed run repeats it"
    other = central(net(seed=1), expected=3.0, noise_multiplier=1.5, clip=2.0)
    assert not torch.equal(released(other, rows), a)


@pytest.mark.parametrize("scale", [0.5, 1.0, 7.0, 1e6, math.inf])
def test_a_client_moves_the_mean_by_at_most_the_clip(scale: float) -> None:
    """With the same noise, one more client moves the mean by C / (q N) or less, however large its upload is."""
    e = central(net(), expected=4.0, clip=2.0)
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    with_client = rows.clone()
    rows[3] = 0
    with_client[3] *= scale
    moved = (released(e, with_client) - released(e, rows)).norm()
    bound = 2.0 / 4.0
    assert float(moved) <= bound * (1 + 1e-5)
    if math.isfinite(scale) and scale > 1:
        assert float(moved) == pytest.approx(bound, rel=1e-5)


def test_changes_are_measured_from_the_broadcast_value_and_divided_by_the_expected_number() -> None:
    e = central(net(), expected=5.0, noise_multiplier=0.0, clip=1.0)
    w = torch.full((2,), 10.0)
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # norms 5 and 0.5
    torch.testing.assert_close(released(e, rows, w=w), w + torch.tensor([0.9, 1.2]) / 5)
    torch.testing.assert_close(released(e, rows[:0], w=w), w)


def test_a_sum_is_clipped_from_zero() -> None:
    """Rows of norm 5 and 0.5; the server adds nothing for each client."""
    cohort = Cohort(central(net(), noise_multiplier=0.0, clip=1.0), np.arange(2), 0)
    w = cohort.broadcast(w=torch.full((2,), 10.0)).w
    up = cohort.upload(theta=torch.tensor([[3.0, 4.0], [0.3, 0.4]]), relative_to={"theta": "w"})
    torch.testing.assert_close(cohort.sum(up.theta), torch.tensor([0.9, 1.2]))
    assert w.tolist() == [10, 10]


def test_without_noise_and_clip_it_is_uniform_fedavg() -> None:
    rows = {}
    for name, change in (("plain", lambda e: replace(e, client_weights="uniform")), ("private", None)):
        e = net()
        e = change(e) if change else central(e, noise_multiplier=0.0, clip=math.inf)
        method = FedAvg()
        method.setup(e.federation, e.model, e.rows)
        for r in range(3):
            method.round(Cohort(e, np.arange(6), r))
        rows[name] = method.w
    torch.testing.assert_close(rows["private"], rows["plain"], atol=1e-6, rtol=0)


def test_a_second_release_needs_releases() -> None:
    e = central(net())
    cohort = Cohort(e, np.arange(4), 0)
    up = cohort.upload(a=torch.zeros(4, 3), b=torch.zeros(4, 3), relative_to={"a": None, "b": None})
    cohort.mean(up.a, weights="uniform")
    with pytest.raises(RunError, match=r"privacy\.releases=1.*at least 2.*'b'"):
        cohort.sum(up.b)


def test_two_releases_have_different_noise() -> None:
    e = central(net(), releases=2)
    cohort = Cohort(e, np.arange(4), 0)
    up = cohort.upload(a=torch.zeros(4, 300), relative_to={"a": None})
    a, b = cohort.sum(up.a), cohort.sum(up.a)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.3 and cohort.cost.releases == 2


def test_noise_does_not_repeat_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.channel.central.BLOCK", 64)
    noise = released(central(net()), torch.zeros(4, 300))
    assert len(noise.unique()) == 300


# -- adaptive clipping -----------------------------------------------------------------------------------
def test_adaptive_clipping_is_that_of_the_paper() -> None:
    """z_delta, and C exp(-lr (b - quantile)) with b = 3/4 of the clients below C, by hand and without noise."""
    e = central(net(), expected=4.0, noise_multiplier=1.0, adaptive_clip=True, count_noise=2.0, clip=1.0)
    assert e.central.sum_multiplier == pytest.approx((1 - 1 / 16) ** -0.5)
    exact = central(net(), expected=4.0, noise_multiplier=0.0, adaptive_clip=True, clip=1.0, clip_lr=0.3, quantile=0.5)
    released(exact, torch.diag(torch.tensor([0.1, 0.5, 1.0, 9.0])))
    assert exact.central.clip() == pytest.approx(math.exp(-0.3 * 0.25))
    assert exact.central.metrics(1)["privacy/clip"] == exact.central.clip()


def test_the_count_of_adaptive_clipping_has_new_noise_in_each_round() -> None:
    """C exp(-lr (b - quantile)) shows the noise of b, N(0, (sigma_b / (q N))^2), here with sigma_b = 0.9 of 3."""
    e = central(net(), expected=3.0, noise_multiplier=1.0, adaptive_clip=True, count_noise=0.9, clip_lr=1.0)
    found = []
    for r in range(400):
        before = e.central.clip()
        released(e, torch.zeros(4, 3), r)  # all four are below C, so that b = (4 - 2) / 3 + 1/2
        found.append(-math.log(e.central.clip() / before) + 0.5 - 7 / 6)
        e.central.clips[np.array([0])] = torch.ones(1, 1, dtype=torch.float64)
    assert np.std(found) == pytest.approx(0.3, rel=0.15) and abs(np.mean(found)) < 0.06


def test_an_upload_that_is_not_finite_counts_as_no_change_above_the_clip() -> None:
    rows = torch.tensor([[0.3, 0.4], [torch.nan, 1.0], [torch.inf, 1.0], [6.0, 8.0]])
    total, below = clipped_sum(rows, None, 1.0)
    torch.testing.assert_close(total, torch.tensor([0.9, 1.2]))
    assert below == 1


def test_each_release_has_its_own_adaptive_clip() -> None:
    """All norms of a are below C, and none of b: C becomes exp(-0.1) and exp(0.1)."""
    e = central(net(), expected=4.0, noise_multiplier=0.0, adaptive_clip=True, clip=1.0, clip_lr=0.2, releases=2)
    for r, (small, large) in enumerate([(0.1, 1.0), (0.1, math.exp(0.1))]):
        cohort = Cohort(e, np.arange(4), r)
        up = cohort.upload(a=0.1 * torch.eye(4), b=9 * torch.eye(4), relative_to={"a": None, "b": None})
        torch.testing.assert_close(cohort.sum(up.a), torch.full((4,), small))
        torch.testing.assert_close(cohort.sum(up.b), torch.full((4,), large))
    metrics = e.central.metrics(2)
    assert metrics["privacy/clip"] == pytest.approx(math.exp(-0.2)) and metrics["privacy/clip_2"] == e.central.clip(1)


def test_the_adaptive_clip_approaches_the_quantile() -> None:
    e = central(
        net(), expected=4.0, noise_multiplier=0.01, adaptive_clip=True, clip=50.0, clip_lr=0.5, count_noise=0.05
    )
    for r in range(60):
        released(e, torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), r)
    assert 1.5 < e.central.clip() < 3.6


def test_a_count_without_noise_to_spare_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.count_noise=0\.4"):
        central(net(), adaptive_clip=True, count_noise=0.4)


# -- sampling --------------------------------------------------------------------------------------------
def test_poisson_cohorts_have_the_stated_moments() -> None:
    mechanism = CentralPrivacy(net().rows, 50, 10.0, 1, noise_multiplier=1.0, delta=1e-3)
    drawn = [mechanism.draw_poisson(0, r) for r in range(2000)]
    sizes = np.array([len(ids) for ids in drawn])
    assert sizes.mean() == pytest.approx(10, abs=0.3) and sizes.var() == pytest.approx(8, rel=0.15)
    rate = np.bincount(np.concatenate(drawn), minlength=50) / 2000
    assert np.abs(rate - 0.2).max() < 0.04
    assert all((mechanism.draw_poisson(0, r) == drawn[r]).all() for r in range(5))


# -- nothing else leaves ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: x[0],
        lambda x: x == 0,
        lambda x: bool(x),
        lambda x: len(x),
        lambda x: list(x),
        lambda x: x.sum(0),
        lambda x: x.shape,
        lambda x: torch.zeros(4, 3) + x,
        lambda x: torch.stack([x, x]),
        lambda x: torch.where(torch.ones(4, 3) > 0, x, 0.0),
        lambda x: np.asarray(x),
        lambda x: setattr(x, "rows", 0),
    ],
)
def test_a_sealed_upload_refuses(use: Any) -> None:
    cohort = Cohort(central(net()), np.arange(4), 0)
    up = cohort.upload(theta=torch.ones(4, 3), relative_to={"theta": None})
    with pytest.raises(RunError, match=r"privacy=central does not cover this method.*'theta'"):
        use(up.theta)


def uploaded_by(cohort: Cohort) -> Any:
    return cohort.upload(theta=torch.ones(len(cohort), 3), relative_to={"theta": None}).theta


@pytest.mark.parametrize(
    "combine, reason",
    [
        (lambda c, x: c.mean(x, weights=torch.ones(4) / 4), "weights of its own"),
        (lambda c, x: c.mean(x, groups=torch.ones(2, 4)), "groups"),
        (lambda c, x: c.subset(np.array([True, True, False, True])).mean(x), "other clients"),
        (lambda c, x: c.all_clients().sum(x), "other clients"),
        (lambda c, x: c.mean(uploaded_by(c.subset(np.arange(4) > 0))), "other clients"),
        (lambda c, x: c.mean(torch.ones(4, 3)), "did not return"),
        (lambda c, x: c.fetch(torch.ones(4, 4) > 0, rows=x), "covers?"),
        (lambda c, x: c.broadcast(w=x), "covers?"),
    ],
)
def test_other_combinations_are_refused(combine: Any, reason: str) -> None:
    cohort = Cohort(central(net()), np.arange(4), 0)
    up = cohort.upload(theta=torch.ones(4, 3), relative_to={"theta": None})
    with pytest.raises(RunError, match=reason):
        combine(cohort, up.theta)


def test_evaluation_releases_nothing() -> None:
    cohort = Cohort(central(net()), np.arange(4), 0, "evaluation")
    up = cohort.upload(theta=torch.ones(4, 3), relative_to={"theta": None})
    with pytest.raises(RunError, match="outside of the rounds"):
        cohort.mean(up.theta)


def test_stored_uploads_are_found() -> None:
    sealed = Sealed(torch.ones(2, 2), "theta", Cohort(net(), np.arange(2), 0).context)
    assert find_sealed({"a": 1, "b": [(sealed,)]}) == "theta" and find_sealed({"a": torch.ones(1)}) is None
    assert copy.copy(sealed) is not None


# -- careless methods ------------------------------------------------------------------------------------
class Trained(FedAvg):
    """FedAvg whose server computes the new model from what it knows by `combine`."""

    def __init__(self, combine: Any):
        super().__init__()
        self.combine = combine

    def round(self, cohort: Cohort) -> None:
        w = cohort.broadcast(w=self.w).w
        self.out = cohort.train(w)
        up = cohort.upload(theta=self.out.theta, change=self.out.theta - w, relative_to={"theta": "w", "change": None})
        self.w = self.combine(self, cohort, up)


def kept(m: Any, c: Cohort, up: Any) -> torch.Tensor:
    """Store an upload where other clients may receive it."""
    m.lost = {"rows": [up.theta]}
    return c.mean(up.change)


def late(m: Any, c: Cohort, up: Any) -> torch.Tensor:
    """Average the upload of the round before, which an object hides."""
    before, m.hidden = getattr(m, "hidden", lambda: up.change), lambda: up.change
    return c.mean(before())


def in_rows(m: Any, c: Cohort, up: Any) -> torch.Tensor:
    m.rows = c.engine.rows("copies", torch.zeros_like(m.w))
    m.rows[c.ids] = up.theta
    return c.mean(up.change)


def other_cohort(m: Any, c: Cohort, up: Any) -> torch.Tensor:
    again = Cohort(c.engine, c.ids, c.round, "evaluation").upload(x=m.out.theta, relative_to={"x": None})
    return c.mean(again.x)


SEALED = {  # careless server code that a run refuses, and the reason
    "trained rows": (lambda m, c, up: m.out.theta.mean(0), "has no effect"),
    "mean of trained rows": (lambda m, c, up: c.mean(m.out.theta), "did not return"),
    "one upload": (lambda m, c, up: up.theta[0], "reads one|operator 'getitem'"),
    "norms": (lambda m, c, up: c.mean(up.change) * up.change.norm(), "attribute 'norm'"),
    "number of uploads": (lambda m, c, up: c.sum(up.change) / len(up.change), "operator 'len'"),
    "weights of losses": (lambda m, c, up: c.mean(up.theta, weights=m.out.loss), "weights of its own"),
    "weighted sum": (lambda m, c, up: c.sum(up.theta, weights=torch.ones(len(c), 1)), "weights of its own"),
    "selected clients": (lambda m, c, up: c.subset(np.arange(len(c)) > 0).mean(up.theta), "other clients"),
    "a stored upload": (kept, "keeps it as state"),
    "an upload in client states": (in_rows, "does not cover"),
    "an upload of the round before": (late, "uploaded at another time"),
    "an upload of an evaluation": (other_cohort, "uploaded at another time"),
    "an integer upload": (lambda m, c, up: c.mean(c.upload(n=c.index).n), "has the type torch.int64"),
}
OPEN = {  # server code that only the test below can find, because it reads no upload
    "losses": lambda m, c, up: c.mean(up.theta) + m.out.loss.mean(),
    "the number of clients": lambda m, c, up: c.sum(up.change) / len(c),
    "gradients": lambda m, c, up: c.mean(up.theta) - c.gradient(m.w)[0].mean(0),
}


def simulated(method: Any, **options: Any) -> Any:
    """A run of an option of conf/algorithm, or of a method."""
    of = case(method if isinstance(method, str) else "fedavg")
    sim = of.simulation(**options)
    sim.engine = central(sim.engine, 3.0, releases=3)
    sim.algorithm = sim.algorithm if isinstance(method, str) else method
    build.check_central(sim.engine, sim.algorithm)
    return set_up(sim)


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_careless_method_is_refused(name: str, is_tuned: bool) -> None:
    combine, reason = SEALED[name]
    method: Any = Trained(combine)
    sim = simulated(FineTuned(method, 1, 0.1, "end", "all") if is_tuned else method)
    with pytest.raises(ConfigError, match=reason):
        for r in range(2):
            cohort = Cohort(sim.engine, np.array([0, 1, 3]), r)
            sim.algorithm.round(cohort)
            simulator.check_options_had_effect(sim, cohort.cost)


def served(method: Any, monkeypatch: pytest.MonkeyPatch, absent: bool = False, **options: Any) -> list[torch.Tensor]:
    """What the server sends to clients other than 0, and its state, if all private sums are noise only."""
    messages: list[torch.Tensor] = []

    def recorded(call: Any) -> Any:
        def send(self: Cohort, *args: Any, **tensors: Any) -> Any:
            received = call(self, *args, **tensors)
            others = torch.from_numpy(self.ids != 0)
            of_all = call.__name__ != "download"
            messages.extend(t.clone() if of_all else t[others] for t in vars(received).values())
            return received

        return send

    with monkeypatch.context() as patch:
        for call in (Cohort.broadcast, Cohort.download, Cohort.fetch):
            patch.setattr(Cohort, call.__name__, recorded(call))
        patch.setattr("fedbench.channel.central.clipped_sum", lambda rows, *_: (rows.new_zeros(rows.shape[1:]), 0))
        sim = simulated(method, **options)
        for r, ids in enumerate(([0, 1, 3], [1, 2, 3, 4], [0, 2, 5])):
            cohort = Cohort(sim.engine, np.array([i for i in ids if i or not absent]), r)
            sim.algorithm.round(cohort)
            simulator.check_options_had_effect(sim, cohort.cost)
    row = sim.algorithm.global_row()
    return [*messages, *([] if row is None else [row]), *sim.algorithm.state_dict().values()]


def leaks(method: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the server tells other clients of the data or the presence of client 0, except by private sums."""
    expected = served(method, monkeypatch)
    assert len(expected) > 3
    others = (served(method, monkeypatch, arrays=other_data()), served(method, monkeypatch, absent=True))
    return not all(
        len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected)) for found in others
    )


@pytest.mark.parametrize("name", OPEN)
def test_information_beside_uploads_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaks(Trained(OPEN[name]), monkeypatch)


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedper", "ditto"),
        *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m not in ("fedavg", "fedper", "ditto")),
    ],
)
def test_the_server_learns_by_private_sums_only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data of client 0, and its absence from all rounds, change no bit if the sums are replaced by 0."""
    try:
        assert not leaks(method, monkeypatch)
    except ConfigError as refused:
        assert REFUSAL in str(refused)


@pytest.mark.parametrize("method", [pytest.param(m, marks=SLOW if i % 3 else ()) for i, m in enumerate(METHODS)])
def test_every_method_runs_or_is_refused_with_the_reason(method: str) -> None:
    """Four rounds, one without clients.  There is no list of methods: a refusal names privacy=central."""
    sim = case(method).simulation()
    sim.engine = central(sim.engine, 3.0, releases=3)
    sim.cfg.choices.algorithm = method
    start = None
    try:
        build.check_central(sim.engine, sim.algorithm)
        set_up(sim)
        start = sim.algorithm.global_row()
        for r, ids in enumerate(([0, 1, 3, 5], [], [1, 2, 3, 4], [0])):
            cohort = Cohort(sim.engine, np.array(ids, np.int64), r)
            sim.algorithm.round(cohort)
            simulator.check_options_had_effect(sim, cohort.cost)
            assert cohort.cost.releases > 0
    except ConfigError as refused:
        assert REFUSAL in str(refused) and ("does not cover" in str(refused) or "no effect" in str(refused))
        return
    row = sim.algorithm.global_row()
    assert row is None or (bool(torch.isfinite(row).all()) and not torch.equal(row, start))


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "fedper", "fedrep", "ditto", "apfl", "fedbabu", "fedavgm", "fedadam"]
)
def test_these_methods_run(method: str) -> None:
    sim = set_up(case(method).simulation())
    sim.engine = central(sim.engine, 4.0)
    sim.algorithm.round(Cohort(sim.engine, np.arange(4), 0))


@pytest.mark.parametrize("method", ["pgfed", "fedfomo", "apple", "fedproto", "fedcac", "fedexp"])
def test_these_methods_are_refused(method: str) -> None:
    sim = set_up(case(method).simulation())
    sim.engine = central(sim.engine, 4.0, releases=9)
    with pytest.raises(RunError, match="privacy=central does not cover this method"):
        cohort = Cohort(sim.engine, np.arange(4), 0)
        sim.algorithm.round(cohort)
        simulator.check_options_had_effect(sim, cohort.cost)


# -- runs ------------------------------------------------------------------------------------------------
def run(folder: Path, *options: str) -> None:
    """Run with these options, and with default ones that they do not set."""
    own = ("privacy.delta=1e-2", "privacy.accountant=rdp", f"output_dir={folder}", "tracking=disabled", *SMALL)
    given = {option.split("=")[0] for option in options} | ({"model.hidden"} if "model=" in str(options) else set())
    fedbench.run("privacy=central", *options, *[option for option in own if option.split("=")[0] not in given])


def test_a_run_states_what_it_spent(tmp_path: Path) -> None:
    run(tmp_path, "algorithm=fedavg", "privacy.target_epsilon=4", "privacy.delta=1e-5", "privacy.accountant=rdp")
    folder = next(tmp_path.rglob("summary.json")).parent
    privacy = json.loads((folder / "summary.json").read_text())["privacy"]
    assert 3.9 < privacy["epsilon_spent"] <= 4 and privacy["delta"] == 1e-5 and "trusted" in privacy["guarantee"]
    assert "numbers of samples" in privacy["guarantee"]
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("privacy/epsilon")
    spent = [float(line.split(",")[column]) for line in lines]
    assert spent == sorted(spent) and spent[-1] == privacy["epsilon_spent"] and len(set(spent)) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "exactly one of"),
        (["privacy.target_epsilon=1", "privacy.noise_multiplier=1"], "exactly one of"),
        (["privacy.noise_multiplier=1", "privacy.delta=0.2"], "less than 1 / N"),
        (["privacy.noise_multiplier=1", "privacy.sampling=fixed", "privacy.accountant=pld"], "accountant=rdp"),
        (["privacy.noise_multiplier=1", "privacy.clip=inf"], "finite"),
        (["privacy.noise_multiplier=1", "client_weights=samples"], "client_weights must be uniform"),
        (["privacy.noise_multiplier=1", "aggregator=median", "sample_rate=1"], "aggregator=mean"),
        (["privacy.noise_multiplier=1", "attack=sign_flip"], "attack=none"),
        (["privacy.noise_multiplier=1", "compression=dadaquant"], "compression=none"),
        (["privacy.noise_multiplier=1", "server=exp"], "does not cover"),
        (["privacy.noise_multiplier=1", "model=resnet", "model.norm=batch", "model.widths=[4]"], "model.norm=group"),
        (["privacy.noise_multiplier=1", "privacy.epsilon=1"], "privacy"),
        (["privacy.noise_multiplier=1", "algorithm=fedper", "new_clients.count=1"], "new clients of this method start"),
        (["privacy.noise_multiplier=-1"], ">= 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message):
        run(tmp_path, *([] if any("algorithm" in o for o in options) else ["algorithm=fedavg"]), *options)


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm=fedavg", "compression=topk"],
        ["algorithm=ditto", "compression=qsgd", "compression.direction=both"],
        ["algorithm=fedper", "system.dropout=0.5"],
        ["algorithm=fedavg", "server=adam"],
        ["algorithm=fedrep", "privacy.sampling=fixed", "clients_per_round=2"],
        ["algorithm=scaffold", "privacy.releases=2", "privacy.adaptive_clip=true", "privacy.count_noise=3"],
        ["algorithm=fedavg", "sample_rate=0.02"],
        ["algorithm=fedavg", "model=vit_tiny", "adapter=lora"],
        ["algorithm=fedavg", "new_clients.count=1", "new_clients.epochs=1"],
    ],
)
def test_other_options_work_beside_it(options: list[str], tmp_path: Path) -> None:
    run(
        tmp_path,
        "privacy.noise_multiplier=1",
        *([] if "model=vit_tiny" in options else ["model.hidden=[16]"]),
        *options,
    )


# -- the audit -------------------------------------------------------------------------------------------
def test_clopper_pearson_by_hand() -> None:
    """n = 1000, no error: FPR below 1 - 0.025^(1/1000) = 0.00368, TPR above its inverse."""
    bound = 1 - 0.025 ** (1 / 1000)
    assert lower_bound(1000, 0, 1000, 0.0) == pytest.approx(math.log((1 - bound) / bound), rel=1e-6)
    assert lower_bound(500, 500, 1000, 0.0) == 0


@pytest.fixture(scope="module")
def sound() -> Any:
    return audit(1.0, runs=1000)


def test_the_audit_is_below_the_accountant(sound: Any) -> None:
    assert 0.5 < sound.lower_bound < sound.epsilon


@pytest.mark.slow
def test_the_audit_finds_half_of_the_noise(sound: Any) -> None:
    broken = CentralPrivacy(
        RowStore(20, torch.device("cpu"), 1 << 20, 1 << 20), 20, 20.0, 1, noise_multiplier=0.5, delta=1e-2
    )
    found = audit(1.0, runs=1000, applied=broken)
    assert found.epsilon == sound.epsilon and found.lower_bound > found.epsilon


@pytest.mark.slow
def test_the_audit_finds_a_missing_clip(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedbench.channel.central.clipped_sum", lambda rows, center, clip: clipped_sum(rows, center, 1e9)
    )
    assert audit(1.0, runs=1000).lower_bound > sound.epsilon


@pytest.mark.slow
def test_the_audit_of_sampled_rounds_is_below_the_accountant() -> None:
    found = audit(1.0, rounds=3, expected=10.0, runs=500)
    assert 0 < found.lower_bound < found.epsilon


# -- resume and processes --------------------------------------------------------------------------------
CRASH = """
import os, signal, sys
import fedbench
from fedbench.channel.central import CentralPrivacy
release = CentralPrivacy.release
def killing(self, context, *args, **named):
    if context.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return release(self, context, *args, **named)
CentralPrivacy.release = killing
fedbench.run(*sys.argv[1:])
"""
ADAPTIVE = (
    *("algorithm=fedper", "privacy=central", "privacy.noise_multiplier=0.5", "privacy.delta=1e-2", "rounds=4"),
    *(
        "privacy.accountant=rdp",
        "privacy.adaptive_clip=true",
        "privacy.count_noise=1",
        "sample_rate=0.6",
        "checkpoint.every=1",
    ),
)


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.csv") if path.name != "costs.csv"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, *ADAPTIVE)
    return tables(folder)


def test_a_killed_run_goes_on_to_equal_bytes(whole: dict[str, bytes], tmp_path: Path) -> None:
    options = [*ADAPTIVE, *[o for o in SMALL if "rounds" not in o], f"output_dir={tmp_path}", "tracking=disabled"]
    ended = subprocess.run([sys.executable, "-c", CRASH, *options], check=False)
    assert ended.returncode == -signal.SIGKILL
    folder = next(tmp_path.rglob("checkpoint.pt")).parent
    fedbench.run(resume=folder)
    assert tables(folder) == whole
    header, *lines = whole["metrics.csv"].decode().splitlines()
    column = header.split(",").index("privacy/clip")
    assert len({line.split(",")[column] for line in lines}) == 4, "the clip moves in every round"


@pytest.mark.slow
def test_two_processes_write_the_scores_of_one(whole: dict[str, bytes], tmp_path: Path) -> None:
    options = [*ADAPTIVE, *[o for o in SMALL if "rounds" not in o], f"output_dir={tmp_path}", "tracking=disabled"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fedbench"]
    subprocess.run([*launch, "hardware=ddp", *options], check=True)
    a, b = (text.decode().splitlines() for text in (tables(tmp_path)["metrics.csv"], whole["metrics.csv"]))
    assert a[0] == b[0] and len(a) == len(b)
    for one, other in zip(a[1:], b[1:]):
        x, y = (np.array([float(v or "nan") for v in line.split(",")]) for line in (one, other))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
