"""Differential privacy: nothing when off, noise as specified when on, and no way around `upload` for any method."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import COHORTS, METHODS, Case, assert_same, case, state_of
from omegaconf import DictConfig, OmegaConf
from prompts import prompts
from tiny import (
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

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.local import Local
from fedbench.channel import privacy
from fedbench.channel.calibration import analytic_ratio, classic_ratio, delta_of, epsilon_of
from fedbench.channel.privacy import Privacy, clipped_towards
from fedbench.config.check import check
from fedbench.core import rng
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.engine.training import LocalTraining
from fedbench.models.resnet import ResNet
from fedbench.nn.columns import Columns
from fedbench.simulation import build, checkpoint, evaluate, simulator
from fedbench.simulation.simulator import Simulation
from fedbench.simulation.summary_text import ending_lines, privacy_lines
from fedbench.testing.algorithm import bypasses_upload

CALIBRATIONS = ("paper", "analytic")
IDS = np.array([4, 0, 5, 2])


def private(e: Engine, epsilon: float = 25, delta: float = 0.05, clip: float | None = 1.0, **options: Any) -> Engine:
    return replace(e, privacy=Privacy(e.rows, epsilon, delta, clip, **options))


def net(optimizer: SGD | None = None, **options: Any) -> Engine:
    return engine(*ragged(), mlp(), optimizer or SGD(lr=0.1), columns=HEAD, **options)


def released(e: Engine, round: int = 0, ids: np.ndarray = IDS, **tensors: Tensor) -> SimpleNamespace:
    return Cohort(e, ids, round).upload(**tensors, relative_to=dict.fromkeys(tensors))


# -- the size of the noise -------------------------------------------------------------------------------
def test_the_papers_sigma() -> None:
    """sqrt(2 ln 25) = 2.537: 0.0507 at epsilon 50, 0.1015 at 25, for C = 1 and delta = 0.05."""
    assert classic_ratio(50, 0.05) == pytest.approx(0.0507, abs=5e-5)
    assert classic_ratio(25, 0.05) == pytest.approx(0.1015, abs=5e-5)
    assert private(net(), 25, clip=3.0).privacy.sigma == pytest.approx(3 * 0.101491, rel=1e-5)


@pytest.mark.parametrize(
    "options, expected",
    [({}, 2.0 * 0.101491), ({"calibration": "analytic"}, 2 * 2.0 * 0.174385), ({"sensitivity": "lr_over_n"}, None)],
)
def test_noise_has_the_stated_deviation(options: dict, expected: float | None) -> None:
    """Clip 2, 40,000 draws a client: the sample deviation is within 1.5%, the mean within 1.5% of sigma; it is normal
    (third and fourth moment), of every client's own, and another tensor's, round's or seed's is independent of it."""
    e = private(net(), clip=2.0, **options)
    zero = torch.zeros(4, 200, 200)
    noise = released(e, gate=zero).gate
    sizes = e.federation.num_samples[IDS]
    for row, n in zip(noise.flatten(1), sizes):
        sigma = expected or 2 * 0.1 * 2.0 / n * 2.537272 / 25
        assert row.std() == pytest.approx(sigma, rel=0.015)
        z = row / sigma
        assert abs(float(z.mean())) < 0.02 and abs(float(z.pow(3).mean())) < 0.06
        assert float(z.pow(4).mean()) == pytest.approx(3, rel=0.05)
    again, later = released(e, gate=zero, other=zero), released(e, 1, gate=zero)
    equal(again.gate, noise)
    seeded = private(net(seed=1), clip=2.0, **options)
    for other in (again.other, later.gate, released(seeded, gate=zero).gate, noise.roll(1, 0)):
        for a, b in zip(noise.flatten(1), other.flatten(1)):
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.025  # 5 deviations


def test_the_rate_of_lr_over_n_is_the_rounds() -> None:
    """2 lr C / n_i sqrt(2 ln 25) / 25 with the rate halved from round to round."""
    e = private(net(SGD(lr=0.1, schedule={"name": "exponential", "gamma": 0.5})), sensitivity="lr_over_n")
    expected = 2 * 0.05 / torch.from_numpy(e.federation.num_samples[IDS]).float() * 2.537272 / 25
    cohort = Cohort(e, IDS, 1)
    close(e.privacy.sigmas(cohort.context, cohort.rate), expected, 1e-6)
    assert e.privacy.sigma is None


def test_a_clients_noise_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many rows are drawn at a time; and it is that of the key (seed, privacy, name, round, client)."""
    e, value = private(net()), torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    whole = released(e, theta=value).theta
    monkeypatch.setattr(privacy, "BLOCK", 40)
    equal(released(e, theta=value).theta, whole)
    equal(released(e, ids=IDS[2:], theta=value[2:]).theta, whole[2:])
    keys = torch.from_numpy(rng.client_keys(rng.key(0, "privacy", "theta", 0, 0), IDS))
    close(whole - value, classic_ratio(25, 0.05) * rng.RowRandom(keys).normal(30), 1e-6)


def test_a_name_uploaded_twice_in_a_round_has_fresh_noise() -> None:
    """Equal noise on two tensors would be subtracted away."""
    cohort = Cohort(private(net()), IDS, 0)
    first, second = (cohort.upload(g=torch.zeros(4, 9), relative_to={"g": None}).g for _ in range(2))
    assert (first - second).abs().min() > 1e-6


def test_tensors_of_any_shape() -> None:
    e = private(net(), calibration="analytic")
    shapes = {"scalar": (4,), "row": (4, 7), "image": (4, 2, 3, 5), "none": (4, 0)}
    up = released(e, **{n: torch.zeros(s) for n, s in shapes.items()}, half=torch.zeros(4, 3, dtype=torch.float64))
    assert {n: tuple(getattr(up, n).shape) for n in shapes} == shapes
    assert up.half.dtype == torch.float64 and all((getattr(up, n) != 0).all() for n in shapes)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_counts_and_flags_are_refused(calibration: str) -> None:
    e = private(net(), calibration=calibration)
    for value, kind in ((torch.ones(4, dtype=torch.int64), "int64"), (torch.ones(4, dtype=torch.bool), "bool")):
        with pytest.raises(ConfigError, match=f"privacy.epsilon=25: noise needs floating-point .* 'votes' as {kind}"):
            released(e, votes=value)


# -- the analytic Gaussian mechanism ---------------------------------------------------------------------
def profile(epsilon: float, ratio: float) -> float:
    """sup over events of P(A) - e^epsilon Q(A) for N(0, s^2) and N(1, s^2), by numerical integration."""
    x = np.linspace(-12 * ratio, 1 + 12 * ratio, 2_000_001)
    p, q = (-(((x - m) / ratio) ** 2) / 2 for m in (1.0, 0.0))
    gap = np.exp(p) * -np.expm1(np.minimum(epsilon + q - p, 0))
    return float(np.trapezoid(gap, x) / (ratio * math.sqrt(2 * math.pi)))


@pytest.mark.parametrize(
    "epsilon, ratio", [(0, 1), (0.1, 3), (1, 1), (1, 0.3), (5, 0.5), (25, 0.17), (50, 0.1), (300, 0.05)]
)
def test_delta_against_the_integral(epsilon: float, ratio: float) -> None:
    assert delta_of(epsilon, ratio) == pytest.approx(profile(epsilon, ratio), rel=1e-6, abs=1e-13)


def test_analytic_sigma() -> None:
    """3.7306 at (1, 1e-5), as in Balle and Wang's released code; below the classical 4.8448, which is valid there;
    above it at epsilon = 50, where the classical formula is no theorem."""
    assert analytic_ratio(1, 1e-5) == pytest.approx(3.730632, abs=1e-6)
    assert analytic_ratio(0.9, 1e-5) < classic_ratio(0.9, 1e-5) == pytest.approx(5.383, abs=1e-3)
    assert analytic_ratio(50, 0.05) > 2 * classic_ratio(50, 0.05)
    for epsilon in (1e-6, 0.1, 1, 50, 1e4, 1e6):
        for delta in (1e-12, 1e-5, 0.05, 0.9):
            ratio = analytic_ratio(epsilon, delta)
            assert delta_of(epsilon, ratio) <= delta < delta_of(epsilon, 0.999 * ratio)


def test_releases_add_up_in_rho() -> None:
    """One release: the epsilon asked for.  Many: less than the general bound rho + 2 sqrt(rho ln(1/delta)), more than
    one, less than the plain sum; and exactly what one Gaussian of sigma / sqrt(n) has."""
    for epsilon, delta in ((1.0, 1e-5), (25.0, 0.05)):
        ratio = analytic_ratio(epsilon, delta)
        rho = 1 / (2 * ratio**2)
        assert epsilon_of(rho, delta) == pytest.approx(epsilon, rel=1e-9)
        for n in (2, 10, 200):
            total = epsilon_of(n * rho, delta)
            assert delta_of(total, ratio / math.sqrt(n)) == pytest.approx(delta, rel=1e-6)
            assert epsilon < total < n * rho + 2 * math.sqrt(n * rho * math.log(1 / delta))
    assert epsilon_of(10 / (2 * analytic_ratio(0.5, 1e-5) ** 2), 1e-5) < 10 * 0.5
    assert epsilon_of(0, 0.05) == 0 and epsilon_of(1e-30, 0.05) == 0


# -- clipping --------------------------------------------------------------------------------------------
def test_within() -> None:
    """(3, 4) at distance 5 from 0; at distance 2 from (3, 2), and 1 from (3, 3), where it may stay."""
    value = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    close(clipped_towards(value, None, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    close(clipped_towards(value, torch.tensor([[3.0, 2.0], [0.3, 0.4]]), 1.0), torch.tensor([[3.0, 3.0], [0.3, 0.4]]))
    equal(clipped_towards(value, torch.tensor([3.0, 3.0]), 1.0)[0], value[0])
    close(clipped_towards(value[:, 0], torch.tensor(2.5), 0.25), torch.tensor([2.75, 2.25]))
    cube = clipped_towards(value[:, None] * torch.ones(2, 3, 2), None, 5.0)
    close(cube.flatten(1).norm(dim=1), torch.tensor([5.0, 0.75**0.5]))


def test_uploads_are_measured_from_the_reference() -> None:
    """One for all, each client's own, or 0."""
    e = private(net(), math.inf, clip=1.0, calibration="analytic")
    ten, six, far = torch.full((3,), 10.0), torch.full((4, 3), 6.0), torch.full((4, 3), 100.0)
    cohort = Cohort(e, IDS, 0)
    cohort.broadcast(ten=ten)
    cohort.download(six=six)
    up = cohort.upload(
        a=far, b=far, c=far, d=far, relative_to={"a": "ten", "b": "six", "c": None}, previous={"d": far - 0.1}
    )
    for found, center in ((up.a, ten), (up.b, six), (up.c, torch.zeros(3))):
        close((found - center).norm(dim=1), torch.ones(4))
        close(found, center + (far - center) / (far - center).norm(dim=1, keepdim=True))
    equal(up.d, far)


def test_releases_are_counted_for_those_who_made_them() -> None:
    e = private(net(), math.inf, clip=1.0, calibration="analytic")
    cohort, own = Cohort(e, np.arange(4), 0), torch.arange(4.0)[:, None].expand(4, 3) * 10
    some = cohort.subset(np.array([False, True, False, True]))
    equal(some.upload(u=own[[1, 3]], previous={"u": own[[1, 3]]}).u, own[[1, 3]])
    cohort.all_clients().upload(u=torch.full((6, 3), 9.0), relative_to={"u": None})
    assert e.privacy.releases.whole()[:, 0].tolist() == [1, 2, 1, 2, 1, 1]


def test_any_data_move_an_upload_by_two_clips_at_most() -> None:
    """The sensitivity that analytic noise is for; the noise is the same in both runs and drops out."""
    rows = []
    for seed in (0, 1):
        e = private(engine(*ragged(seed=seed), mlp(), SGD(lr=0.5), epochs=4), clip=0.1, calibration="analytic")
        cohort = all_clients(e)
        w = cohort.broadcast(w=e.model.init_row()).w
        out = cohort.train(w).theta
        assert ((out - w).norm(dim=1) > 0.2).all()
        rows.append(cohort.upload(theta=out, relative_to={"theta": "w"}).theta)
    moved = (rows[0] - rows[1]).norm(dim=1)
    assert (moved < 0.2 + 1e-5).all() and (moved > 0.1).any()


def points(lr: float = 1.0, **options: Any) -> Engine:
    """f_i(theta) = 0.5 |theta - y_i|^2 with y_0 = (3, 4), y_1 = (0.3, 0.4), from 0: gradients of norm 5 and 0.5."""
    return engine_on(
        targets_federation([np.array([[3.0, 4.0]]), np.array([[0.3, 0.4]])]),
        Point([0.0, 0.0]),
        SGD(lr=lr),
        columns={"head": ["theta.*"], "base": []},
        **options,
    )


CUT = torch.tensor([[0.6, 0.8], [0.3, 0.4]])  # one step of rate 1 under a clip at 1
FREE = torch.tensor([[3.0, 4.0], [0.3, 0.4]])


@pytest.mark.parametrize(
    "options, mode, uploaded, expected",
    [
        ({}, "round", True, CUT),
        ({}, "round", False, FREE),
        ({}, "evaluation", True, FREE),
        ({"calibration": "analytic"}, "round", True, FREE),
        ({"epsilon": math.inf}, "round", True, CUT),
        ({"epsilon": math.inf, "clip": None}, "round", True, FREE),
    ],
)
def test_steps_are_clipped(options: dict, mode: str, uploaded: bool, expected: Tensor) -> None:
    cohort = all_clients(private(points(), **options), mode=mode)
    close(cohort.train(torch.zeros(2), how=LocalTraining(uploaded=uploaded)).theta, expected)

    def step(s: Any, batch: Any) -> None:
        s.descend(s.grad(batch), uploaded=uploaded)

    close(cohort.train(torch.zeros(2), step=step).theta, expected)


def test_the_smaller_of_two_clips_counts() -> None:
    e = private(points())
    for clip, factor in ((0.25, 0.25), (10.0, 1.0)):
        clipping = replace(e, optimizer=SGD(lr=1.0, clip=clip))
        close(all_clients(clipping).train(torch.zeros(2)).theta[0], factor * CUT[0])


def test_steps_are_clipped_over_the_columns_that_move_and_are_uploaded() -> None:
    """A prompt and a gate in one row: the prompt's gradient is clipped by its own norm, the gate's not at all."""
    e = private(points())
    prompt, gate = Columns([(0, 1)]), Columns([(1, 2)])

    def two(s: Any, batch: Any) -> None:
        g = s.grad(batch)
        s.descend(g, columns=prompt)
        s.descend(g, columns=gate, uploaded=False)

    def both(s: Any, batch: Any) -> None:
        g = s.grad(batch)
        s.descend(g, columns=prompt)
        s.descend(g, columns=gate)

    for step, uploaded in ((two, True), (both, prompt), (None, prompt)):
        out = all_clients(e).train(torch.zeros(2), step=step, how=LocalTraining(uploaded=uploaded))
        close(out.theta, torch.tensor([[1.0, 4.0], [0.3, 0.4]]))
    close(all_clients(e).train(torch.zeros(2), step=both).theta, torch.tensor([[1.0, 1.0], [0.3, 0.4]]))
    close(all_clients(e).train(torch.zeros(2), columns=prompt).theta, torch.tensor([[1.0, 0.0], [0.3, 0.0]]))


def test_a_state_is_clipped_by_its_own_norm() -> None:
    """v of three numbers, no row of the model, with gradient (2, 3, 6) of norm 7."""
    g = torch.tensor([[2.0, 3.0, 6.0]])
    for uploaded, size in ((True, 1.0), (False, 7.0)):

        def step(s: Any, batch: Any, uploaded: bool = uploaded) -> None:
            s.descend(g.expand(s.k, 3), "v", lr=1.0, uploaded=uploaded)

        out = all_clients(private(points())).train(torch.zeros(2), step=step, v=torch.zeros(2, 3))
        close(out.v.norm(dim=1), torch.full((2,), size))


@pytest.mark.parametrize("name, kept", [("fedper", "head"), ("fedrod", "head2"), ("lg_fedavg", "base")])
def test_personal_columns_are_not_clipped(name: str, kept: str) -> None:
    """One full-batch step under a clip at 1e-3: the columns that stay move as without privacy, the others hardly."""
    moved = []
    for on in (False, True):
        e = net(SGD(lr=1.0), batch_size=100)
        method = build.algorithm(compose([f"algorithm={name}"]))
        e = private(e, math.inf, clip=1e-3) if on else e
        a = play(e, method, rounds=0)
        before = deployed(e, a)
        play(e, a, 1, begin=1)
        own = e.model.columns[kept]
        moved.append([c.take(deployed(e, a) - before) for c in (own, own.rest(e.model.size))])
    (kept_free, sent_free), (kept_on, sent_on) = moved
    equal(kept_on, kept_free)
    assert (sent_on.norm(dim=1) < 1.01e-3).all() and (sent_free.norm(dim=1) > 0.01).all()


@pytest.mark.parametrize("name, kept", [("fedotp", "local"), ("pfedmoap", "gate")])
def test_personal_prompts_and_gates_are_not_clipped(name: str, kept: str) -> None:
    """As above, in round 2, where pFedMoAP's gates begin to learn."""
    moved = []
    for on in (False, True):
        e = prompts(SGD(lr=1.0), tokens=3, batch_size=100)
        a = play(e, build.algorithm(compose([f"algorithm={name}"])), 1)
        before = rows_of(deployed(e, a))
        if on:
            e = private(e, math.inf, clip=1e-4)
        play(e, a, 1, begin=1)
        moved.append([e.model.columns[c].take(rows_of(deployed(e, a, 1)) - before) for c in (kept, "prompt")])
    (kept_free, sent_free), (kept_on, sent_on) = moved
    equal(kept_on, kept_free)
    assert (kept_on.norm(dim=1) > 1e-3).all() and not torch.allclose(sent_on, sent_free, atol=1e-4)


def rows_of(found: Any) -> Tensor:
    return found["theta"] if isinstance(found, dict) else found


def test_what_stays_with_its_client_is_not_clipped() -> None:
    """Local, and Ditto's personal rows, train as without privacy; Ditto's global path does not."""
    plain, noisy = net(SGD(lr=0.5)), private(net(SGD(lr=0.5)), clip=0.01)
    equal(play(noisy, Local(), 2).theta.whole(), play(plain, Local(), 2).theta.whole())
    a, b = play(net(SGD(lr=0.5)), Ditto(lam=0.0), 1), play(private(net(SGD(lr=0.5)), clip=0.01), Ditto(lam=0.0), 1)
    equal(a.v.whole(), b.v.whole())
    e = private(net(SGD(lr=0.5)), math.inf, clip=0.01)
    assert (play(e, FedAvg(), 1).w - e.model.init_row()).norm() < 0.5 * 0.01 * 5 + 1e-6  # at most 5 steps


# -- a whole run -----------------------------------------------------------------------------------------
SMALL = [
    "hardware=cpu",
    "hardware.executor=vmap",
    "tracking=disabled",
    "rounds=3",
    "partition.num_clients=6",
    "clients_per_round=3",
    "local.epochs=1",
    "model.hidden=[8]",
    "optimizer.lr=0.1",
]


def config(*overrides: str) -> DictConfig:
    return OmegaConf.create(check(compose([*SMALL, *overrides])))


def run(folder: Path, *overrides: str, resume: bool = False) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    return simulator.run(config(*overrides), folder, resume)


def files(folder: Path) -> list[bytes]:
    return [(folder / f"{name}.csv").read_bytes() for name in ("metrics", "clients")]


@pytest.mark.parametrize(
    "off",
    [
        "privacy.epsilon=null",
        "privacy.epsilon=inf privacy.clip=null",
        "privacy.epsilon=inf privacy.clip=inf privacy.calibration=analytic",
    ],
)
def test_without_noise_and_clip_it_is_no_privacy(off: str, tmp_path: Path) -> None:
    """sigma = 0 and C = infinity: the same tables, byte for byte."""
    plain = run(tmp_path / "plain", "algorithm=pgfed")
    assert "privacy" not in plain
    found = run(tmp_path / "off", "algorithm=pgfed", *off.split())
    assert files(tmp_path / "off") == files(tmp_path / "plain")
    assert found["cost"]["bytes_up"] == plain["cost"]["bytes_up"]
    if "inf" in off:
        assert found["privacy"]["guarantee"].startswith("no guarantee: epsilon is infinite")
        assert found["privacy"]["epsilon_spent"] is found["privacy"]["epsilon"] is None


def test_off_is_no_part_of_the_hash() -> None:
    """Runs from before there was privacy are recognized, whatever its other keys say while it is off."""
    plain = compose([])
    assert config_hash(compose(["privacy.clip=2"])) == config_hash(plain)
    before = plain.copy()
    del before.privacy
    on, other = (config_hash(compose(["privacy.epsilon=25", f"privacy.clip={c}"])) for c in (1, 2))
    assert config_hash(before) == config_hash(plain) != on != other
    assert "privacy" not in check(before)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_the_record_of_a_run(calibration: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PGFed uploads theta, g, c, and from the second round a client's own coefficients: 3 and then 4 tensors."""
    caplog.set_level("INFO", "fedbench")
    summary = run(
        tmp_path, "algorithm=pgfed", "clients_per_round=6", "privacy.epsilon=25", f"privacy.calibration={calibration}"
    )
    found = summary["privacy"]
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"] == found
    assert found["releases"] == 3 + 4 + 4 and (found["epsilon"], found["delta"], found["clip"]) == (25, 0.05, 1.0)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("privacy: ")]
    assert [" ".join(line.split()) for line in said] == [f"privacy: {found['guarantee']}"]
    ending = next(line for line in ending_lines(summary, tmp_path) if line.startswith("  privacy: "))
    lines = privacy_lines(found)
    assert ending == lines[0] and " ".join(" ".join(lines).split()).endswith(found["guarantee"])
    if calibration == "paper":
        assert found["epsilon_spent"] is None and found["sigma"] == pytest.approx(0.10149, rel=1e-4)
        for words in (
            "noise robustness, not a certified guarantee",
            "by batch, not by sample",
            "epsilon < 1 only",
            "one release",
            "rounds are not accounted for",
            "numbers of samples",
        ):
            assert words in found["guarantee"]
    else:
        rho = 11 / (2 * analytic_ratio(25, 0.05) ** 2)
        assert found["epsilon_spent"] == pytest.approx(epsilon_of(rho, 0.05)) and found["epsilon_spent"] > 60
        assert "(epsilon, delta) = (" in ending and f"{found['epsilon_spent']:.4g}, 0.05) in total" in ending
        assert "each upload of a tensor, by itself, is differentially private" in found["guarantee"]


def test_most_spent_is_of_the_client_that_took_part_most() -> None:
    e = private(net(), 1.0, calibration="analytic")
    assert e.privacy.spent() == (0, 0.0)
    play(e, FedAvg(), 3, [[0, 1], [1, 2], [1, 5]])
    assert e.privacy.releases.whole()[:, 0].tolist() == [1, 3, 1, 0, 0, 1]
    assert e.privacy.spent() == (3, epsilon_of(3 / (2 * analytic_ratio(1, 0.05) ** 2), 0.05))


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_a_resumed_run_has_the_same_noise_and_account(calibration: str, tmp_path: Path) -> None:
    on = ["algorithm=pgfed", "privacy.epsilon=25", f"privacy.calibration={calibration}", "checkpoint.every=1"]
    whole = run(tmp_path / "whole", *on)
    with pytest.MonkeyPatch.context() as patch:
        real = simulator.run_round

        def stop(sim: Simulation, *more: Any) -> Any:
            if sim.done == 2:
                raise KeyboardInterrupt
            return real(sim, *more)

        patch.setattr(simulator, "run_round", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", *on)
    resumed = run(tmp_path / "parts", *on, resume=True)
    assert files(tmp_path / "parts") == files(tmp_path / "whole") and resumed["privacy"] == whole["privacy"]


def test_mistakes_are_one_sentence() -> None:
    on = "privacy.epsilon=25"
    for overrides, words in [
        (["privacy.epsilon=0"], "privacy.epsilon must be a number > 0 or inf or null, got 0"),
        (["privacy.epsilon=-3"], "privacy.epsilon must be a number > 0 or inf or null, got -3"),
        (["privacy.epsilon=much"], "privacy.epsilon must be a number > 0 or inf or null, got 'much'"),
        (["privacy.delta=0"], "privacy.delta must be a number in (0, 1), got 0"),
        (["privacy.delta=1"], "privacy.delta must be a number in (0, 1), got 1"),
        (["privacy.clip=0"], "privacy.clip must be a number > 0 or inf or null, got 0"),
        ([on, "privacy.clip=null"], "privacy.clip must be a finite number > 0 with privacy.epsilon=25, got"),
        ([on, "privacy.clip=inf"], "got inf; use privacy.epsilon=inf for no noise"),
        (["privacy.calibration=exact"], "privacy.calibration must be one of paper, analytic, got 'exact'"),
        (
            [on, "privacy.calibration=analytic", "privacy.sensitivity=lr_over_n"],
            "privacy.sensitivity must be clip with privacy.calibration=analytic",
        ),
        (["privacy.sigma=1"], "privacy.sigma is unknown"),
    ]:
        with pytest.raises(ConfigError) as caught:
            check(compose(overrides))
        assert words in str(caught.value) and "\n" not in str(caught.value)
    check(compose(["privacy.epsilon=inf", "privacy.clip=null"]))


# -- pairs that are refused ------------------------------------------------------------------------------
class Leaky(FedAvg):
    bypasses_upload = "algorithm=leaky whispers"


def refused(e: Engine, algorithm: Algorithm) -> str:
    with pytest.raises(ConfigError) as caught:
        build.check_method(e, algorithm)
    return str(caught.value)


def test_a_method_that_leaks_is_refused() -> None:
    for method in (Leaky(), FineTuned(Leaky(), 1, None, "end", "all")):
        assert refused(private(net()), method) == (
            "privacy.epsilon=25 does not cover this method: algorithm=leaky whispers; choose another algorithm, or set "
            "privacy.epsilon=null"
        )
        build.check_method(net(), method)


def test_running_statistics_are_refused() -> None:
    arrays, split = ragged(shape=(1, 8, 8))
    for norm, fails in (("batch", True), ("group", False)):
        e = private(engine(arrays, split, ResNet((1, 8, 8), 3, [4], norm)))
        with pytest.raises(ConfigError, match="BatchNorm") if fails else contextlib.nullcontext():
            build.check_method(e, FedAvg())


def test_a_method_that_forbids_clipped_steps_is_refused_with_them_only() -> None:
    method = build.algorithm(compose(["algorithm=scaffold"]))
    words = refused(private(net()), method)
    assert words.startswith("privacy.clip=1 with privacy.calibration=paper clips every local step: algorithm")
    build.check_method(private(net(), calibration="analytic"), method)
    with_momentum = refused(private(net(SGD(lr=0.1, momentum=0.9, weight_decay=0.1))), method)
    assert with_momentum.startswith("algorithm")  # refused without privacy, too


# -- every method ----------------------------------------------------------------------------------------
def prepared(
    found: Case, calibration: str | None, plan: str = "vmap", epsilon: float = 25, **values: Any
) -> Simulation:
    """The method's simulation with privacy, checked and set up; skips those that it refuses."""
    sim = found.simulation(plan, **values)
    if calibration is not None:
        sim.engine = private(sim.engine, epsilon, calibration=calibration)
    try:
        build.check_method(sim.engine, sim.algorithm)
    except ConfigError as words:
        pytest.skip(str(words))
    sim.algorithm.setup(sim.engine.federation, sim.engine.model, sim.engine.rows)
    return sim


def run_rounds(sim: Simulation, stop: int) -> Simulation:
    while sim.done < stop:
        sim.algorithm.round(Cohort(sim.engine, np.array(COHORTS[sim.done]), sim.done))
        sim.done += 1
    return sim


def able(name: str) -> Case:
    found = case(name)
    if found.reason is not None:
        pytest.skip(found.reason)
    return found


@pytest.fixture(params=[pytest.param(m, marks=pytest.mark.slow if i % 2 else ()) for i, m in enumerate(METHODS)])
def other_method(request: pytest.FixtureRequest) -> Case:
    """Every second one by default."""
    return able(request.param)


LOADS_CLIP = ("fedotp", "pfedprompt", "zero_shot")  # pfedmoap, too: it stands for them by default


@pytest.mark.parametrize(
    "name, calibration",
    [
        pytest.param(name, calibration, marks=pytest.mark.slow if (i + j) % 4 or name in LOADS_CLIP else ())
        for i, name in enumerate(METHODS)
        for j, calibration in enumerate(CALIBRATIONS)
    ],
)
def test_every_method_runs_and_all_its_uploads_are_noisy(
    name: str, calibration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of every tensor that leaves a client is changed; what is evaluated is finite.  By default each
    method has one calibration."""
    method = able(name)
    sim, real, seen = prepared(method, calibration), Cohort.upload, []

    def upload(self: Cohort, **tensors: Any) -> SimpleNamespace:
        up = real(self, **tensors)
        tensors = {
            name: t
            for name, t in tensors.items()
            if name not in ("relative_to", "previous", "uncompressed", "num_values")
        }
        seen.extend(tensors)
        for name, t in tensors.items():
            got = getattr(up, name)
            assert got.shape == t.shape and got.dtype == t.dtype and (got != t).all(), name
        return up

    with monkeypatch.context() as patch:
        patch.setattr(Cohort, "upload", upload)
        run_rounds(sim, 2)
    scores = evaluate.personal(sim.algorithm, sim.engine, np.arange(6), 1, True)
    assert np.isfinite(scores["loss"]).all()
    plain = prepared(method, None)
    cohort = Cohort(plain.engine, np.array(COHORTS[0]), 0)
    plain.algorithm.round(cohort)
    assert bool(seen) == (cohort.cost.bytes_up > 0)  # no byte goes up without its noise


@pytest.mark.slow
def test_every_plan_gives_the_same_rows_and_noise(other_method: Case) -> None:
    def found(plan: str) -> dict[str, Tensor]:
        return state_of(run_rounds(prepared(other_method, "paper", plan), 2), deploy=False)

    whole = found("vmap")
    for plan in ("loop", "threads"):
        assert_same(found(plan), whole, 1e-4)


@pytest.mark.slow
def test_resuming_repeats_the_noise(other_method: Case, tmp_path: Path) -> None:
    whole = run_rounds(prepared(other_method, "analytic"), 3)
    first, second = run_rounds(prepared(other_method, "analytic"), 2), prepared(other_method, "analytic")
    checkpoint.save(tmp_path, first.state())
    second.load(checkpoint.load(tmp_path))
    assert_same(state_of(run_rounds(second, 3)), state_of(whole))


@pytest.mark.slow
def test_what_is_infinitely_loose_changes_no_bit(other_method: Case) -> None:
    for calibration in CALIBRATIONS:
        loose = prepared(other_method, calibration, epsilon=math.inf)
        loose.engine.privacy.clip = None
        found = state_of(run_rounds(loose, 2))
        del found["/rows/privacy"]
        assert_same(found, state_of(run_rounds(prepared(other_method, None), 2)))


def test_what_says_that_it_leaks_does() -> None:
    """APPLE that asks for cores by its relationship vector; with the uniform choice it tells nothing."""
    limited = {"algorithm.bandwidth": 4, "algorithm.eta2": 0.5}
    intended, uniform = (limited | {"algorithm.selection": s} for s in ("intended", "uniform"))
    for values, leaks in ((intended, True), (uniform, False), ({}, False)):
        cfg = case("apple").simulation(**values).cfg
        assert (build.algorithm(cfg).bypasses_upload is not None) is leaks
        assert bypasses_upload(case("apple"), **values) is leaks
    assert build.algorithm(case("pgfed_exact").simulation().cfg).bypasses_upload is not None


@pytest.mark.parametrize("name", ["fedavg_local", "pgfed"])
def test_clients_deploy_what_they_trained_without_noise(name: str) -> None:
    sim = prepared(case(name), "paper", epsilon=1.0, **{"optimizer.lr": 1e-30})
    start = sim.engine.model.init_row()
    run_rounds(sim, 1)
    close(sim.algorithm.theta.whole(), start.expand(6, -1), 1e-6)
    assert (sim.algorithm.w - start).norm() > 1


@pytest.mark.parametrize("name, own", [("fedamp", "theta"), ("apple", "core")])
def test_clients_go_on_from_their_own_rows(name: str, own: str) -> None:
    """FedAMP and APPLE at learning rate 0 and noise of deviation 2.5: a client's row stays what it was, round by round,
    while the server's copies are far off."""
    sim = prepared(case(name), "paper", epsilon=1.0, **{"optimizer.lr": 1e-30})
    start = sim.algorithm.exchange.cores.clone() if name == "apple" else sim.engine.model.init_row().expand(6, -1)
    run_rounds(sim, 4)
    close(getattr(sim.algorithm, own).whole(), start, 1e-6)
    held = sim.algorithm.exchange.cores if name == "apple" else sim.algorithm.w.whole()
    assert ((held - start).norm(dim=1) > 10).all()
