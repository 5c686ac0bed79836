"""Aggregation rules in runs: which methods use them, groups and weights, stopped runs, and what is refused."""

import csv
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Normed, four_of_six
from cases import COHORTS, METHODS_BY_SPEED, case, set_up, state_of
from tiny import close, compose, engine, equal, play, ragged, seeded
from torch import Tensor

from fedbench.aggregators.base import Aggregator, Uploads
from fedbench.aggregators.centered_clipping import CenteredClipping
from fedbench.aggregators.krum import Krum
from fedbench.aggregators.median import Median
from fedbench.aggregators.norm_bound import NormBound
from fedbench.algorithms.fedavg import FedAvg
from fedbench.channel.aggregate import mean, robust_mean
from fedbench.channel.channel import Channel
from fedbench.core.options import ConfigError, RunError
from fedbench.core.settings import config_hash, to_dict, update_stored
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.simulation import checkpoint
from fedbench.simulation.simulator import run

OPTIONS = [
    *("algorithm=fedavg", "dataset=digits", "model=logistic", "partition.num_clients=8", "partition.alpha=1"),
    *("clients_per_round=6", "rounds=4", "local.epochs=1", "local.batch_size=16", "tracking=disabled"),
    *("hardware.device=cpu", "hardware.executor=vmap", "checkpoint.every=1", "optimizer.momentum=0.9"),
]
# methods that combine no uploads, or combine them by operations of their own
WITHOUT_MEANS = {"apple", "fedamp", "fedfomo", "fedgh", "fpfc", "heurfedamp", "local", "zero_shot"}


class First(Aggregator):
    """The first row, and what the rule was given."""

    def combine(self, u: Uploads) -> Tensor:
        self.last = u
        return u.rows[0]


def with_rule(rule: Aggregator | None, e: Engine | None = None) -> Engine:
    return replace(e or four_of_six(), aggregator=rule)


def cohort_of(e: Engine, ids: Any = (0, 1, 3, 5)) -> Cohort:
    return Cohort(e, np.array(ids), 0)


# -- methods ---------------------------------------------------------------------------------------------
def first_round(method: str, *more: str) -> tuple[bool, dict[str, Tensor]]:
    """Return whether a round used the rule, and all states after it."""
    sim = set_up(case(method).on([*case(method).overrides, *more]).simulation())
    cohort = Cohort(sim.engine, np.array(COHORTS[0]), 0)
    sim.algorithm.round(cohort)
    return cohort.cost.takes_aggregates, state_of(sim)


@pytest.mark.parametrize("method", METHODS_BY_SPEED)
def test_every_method_that_averages_runs_with_a_rule(method: str) -> None:
    """The rule changes the states of those methods, and of no others."""
    more = ["algorithm.head_iter=0"] if method.startswith("lc_fed") else []  # else all bodies are equal in round 1
    used, state = first_round(method, "aggregator=median", *more)
    assert used == (method not in WITHOUT_MEANS)
    assert all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point())
    _, plain = first_round(method, *more)
    changed = [name for name in plain if not torch.equal(plain[name], state[name])]
    assert bool(changed) == used


def test_the_rule_receives_uploads_weights_and_the_server_model() -> None:
    rule = First(f=0.25)
    e = with_rule(rule)
    algorithm = play(e, FedAvg(), 1, [[0, 1, 3, 5]])
    n = e.federation.num_samples[[0, 1, 3, 5]]
    close(rule.last.weights, torch.from_numpy(n / n.sum()).float())
    close(rule.last.center, e.model.init_row())
    assert rule.last.f == 1 and rule.last.rows.shape == (4, e.model.size)
    equal(algorithm.w, rule.last.rows[0])


def test_running_statistics_are_part_of_the_row() -> None:
    """With Krum, the server has the statistics of the client whose parameters it has."""
    arrays, split = ragged()
    e = engine(arrays, split, seeded(Normed), batch_size=4, drop_last=True)
    rule = Krum(f=1)
    rule.combine = lambda u: setattr(rule, "rows", u.rows) or Krum.combine(rule, u)  # type: ignore[method-assign]
    w = play(with_rule(rule, e), FedAvg(), 1).w
    p = e.model.trained.size
    assert p < len(w) and [i for i, row in enumerate(rule.rows) if torch.equal(row, w)] != []
    assert not torch.equal(w[p:], rule.rows.mean(0)[p:])


# -- means -----------------------------------------------------------------------------------------------
def test_groups_and_given_weights() -> None:
    """The rule is applied to each group, an empty group has 0, and weights that sum to s give s times the estimate."""
    cohort = cohort_of(with_rule(Median()))
    rows = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    groups = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]).bool()
    found = cohort.mean(rows, weights="uniform", groups=groups)
    close(found, torch.stack([rows[:3].median(0).values, torch.zeros(2, 3), rows[3]]))
    close(cohort.mean(rows, weights=torch.full((4,), 0.5)), 2 * cohort.mean(rows, weights="uniform"))
    close(cohort.mean(rows[:, 0, 0], weights="uniform"), torch.tensor(np.median(rows[:, 0, 0])))
    close(cohort.mean(rows, weights=torch.tensor([0.0, 0.3, 0.3, 0.4])), rows[1:].median(0).values)
    equal(cohort.mean(rows, weights=torch.zeros(4)), torch.zeros(2, 3))


def test_the_rule_that_returns_the_mean_is_the_mean_bit_for_bit() -> None:
    class Plain(Aggregator):
        def combine(self, u: Uploads) -> Tensor:
            return u.mean

    cohort, rows = cohort_of(four_of_six()), torch.randn(4, 7)
    for weights in ("samples", "uniform"):
        equal(robust_mean(cohort.context, Plain(), rows, weights, None, None), mean(cohort.context, rows, weights))
    equal(play(with_rule(Plain()), FedAvg(), 2).w, play(four_of_six(), FedAvg(), 2).w)


def test_buckets_are_random_and_those_of_a_client_do_not_depend_on_its_position() -> None:
    """Another round has other buckets."""
    rows = torch.eye(4)
    buckets = []
    for round in range(6):
        rule = First(f=0, pre="bucketing")
        Cohort(with_rule(rule), np.array([0, 1, 3, 5]), round).mean(rows, weights="uniform")
        assert rule.last.rows.shape == (2, 4) and sorted(rule.last.rows.flatten().tolist()) == [0] * 4 + [0.5] * 4
        buckets.append(sorted(rule.last.rows.tolist()))
    assert len({str(b) for b in buckets}) > 1


# -- sums ------------------------------------------------------------------------------------------------
SUMS = {  # a method that sums uploads, and a state of the server that is computed from the sum
    "feddyn": "algorithm/h",
    "scaffold": "algorithm/c",
    "pgfed": "algorithm/gbar",
    "l2gd": "rows/x",
    "lc_fed": "algorithm/w",
    "fedproto": "algorithm/G",
}


def test_a_sum_is_the_number_of_clients_times_the_estimate() -> None:
    rows = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    cohort = cohort_of(with_rule(Median()))
    close(cohort.sum(rows), 4 * cohort.mean(rows, weights="uniform"))
    assert float((cohort.sum(rows) - rows.sum(0)).abs().max()) > 1e-3
    equal(cohort.sum(rows, exact=True), rows.sum(0))
    equal(cohort_of(four_of_six()).sum(rows), rows.sum(0))


def test_a_sum_with_weights_is_estimated_for_each_part() -> None:
    """Of clients with a positive weight; nobody has the last part."""
    rows = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([[4.0, 0, 0], [4, 2, 0], [4, 2, 0], [4, 2, 0]])
    found = cohort_of(with_rule(Median())).sum(rows, weights=counts)
    close(
        found,
        torch.stack(
            [16 * torch.from_numpy(np.median(rows[:, 0], 0)), 6 * rows[1:, 1].median(0).values, 0 * rows[0, 2]]
        ),
    )
    equal(cohort_of(four_of_six()).sum(rows, weights=counts), (counts[..., None] * rows).sum(0))


@pytest.mark.parametrize("method", SUMS)
def test_a_wrong_upload_does_not_move_sums(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With aggregator=mean, it does.  The wrong client uploads 1e6 in each value."""

    def largest(rule: str) -> float:
        more = {"l2gd": ["algorithm.steps=epochs"], "fedproto": ["algorithm.weights=uniform"]}.get(method, [])
        sim = set_up(case(method).on([*case(method).overrides, *more, f"aggregator={rule}"]).simulation())
        sim.algorithm.round(Cohort(sim.engine, np.array(COHORTS[0]), 0))
        return float(sums_of(sim, method).abs().max())

    upload = Channel.upload

    def wrong(channel: Channel, context: Any, *args: Any, **options: Any) -> Any:
        received = upload(channel, context, *args, **options)
        for name, t in vars(received).items():
            setattr(received, name, t.index_fill(0, torch.tensor([0]), 1e6) if t.is_floating_point() else t)
        return received

    monkeypatch.setattr(Channel, "upload", wrong)
    assert largest("median") < 1e3 < largest("mean")


def sums_of(sim: Any, method: str) -> Tensor:
    """Return the state of SUMS: of L2GD, the model of a client that did not upload the wrong values."""
    kind, name = SUMS[method].split("/")
    return sim.engine.rows.all[name][np.array(COHORTS[0][1:2])] if kind == "rows" else getattr(sim.algorithm, name)


# -- uploads that are not finite ---------------------------------------------------------------------------
class NotFinite(FedAvg):
    """FedAvg, in which clients upload NaN in some rounds."""

    clients: tuple[int, ...] = (1, 5)

    def round(self, cohort: Cohort) -> None:
        w = cohort.broadcast(w=self.w).w
        theta = cohort.train(w).theta
        if cohort.round > 0:
            theta[np.isin(cohort.ids, self.clients), 3] = torch.nan
        self.w = cohort.mean(cohort.upload(theta=theta, relative_to={"theta": "w"}).theta, updates="w")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_client_whose_upload_is_not_finite_is_left_out(value: float) -> None:
    """The result is that of the others, with their weights, groups and buckets."""
    rule = Median(pre="bucketing")
    cohort, others = cohort_of(with_rule(rule)), cohort_of(with_rule(rule), (0, 1, 5))
    rows = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    finite = rows[[0, 1, 3]]
    rows[2, 1, 0] = value
    for weights in ("samples", "uniform"):
        equal(cohort.mean(rows, weights), others.mean(finite, weights))
    close(cohort.mean(rows, torch.tensor([0.2, 0.2, 0.4, 0.2])), others.mean(finite, torch.full((3,), 1 / 3)))
    groups = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    equal(cohort.mean(rows, groups=groups), others.mean(finite, groups=groups[:, [0, 1, 3]]))
    close(cohort.sum(rows), 4 / 3 * others.sum(finite))
    assert cohort.cost.left_out == {3} and cohort.cost.takes_aggregates and not others.cost.left_out
    assert not torch.isfinite(cohort_of(four_of_six()).mean(rows)).all()


def test_very_large_uploads_are_finite() -> None:
    """Their sum is not."""
    cohort, rows = cohort_of(with_rule(Median())), torch.randn(4, 3)
    rows[2] = 3e38
    assert torch.isfinite(cohort.mean(rows)).all() and not cohort.cost.left_out


@pytest.mark.parametrize("options", [{}, {"weights": torch.tensor([0.5, 0.5, 0.0, 0.0])}, {"groups": torch.eye(4)}])
def test_a_mean_without_finite_uploads_ends_the_run(options: dict[str, Any]) -> None:
    rows = torch.full((4, 3), torch.nan)
    if options:
        rows[2:] = 1.0
    with pytest.raises(RunError, match="in round 1, all uploads that the server combines have NaN or infinite values"):
        cohort_of(with_rule(Median())).mean(rows, **options)


@pytest.mark.parametrize("server", ["average", "exp", "momentum"])
def test_a_run_counts_and_reports_clients_that_are_left_out(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also if the run is resumed.  With aggregator=mean, the run ends as before."""
    monkeypatch.setattr("fedbench.algorithms.fedavg.FedAvg", NotFinite)
    words = [f"server={server}", "clients_per_round=8"]
    with caplog.at_level(logging.WARNING):
        run_in(tmp_path / "a", *words, "aggregator=trimmed_mean", "checkpoint.pause_after=3")
        summary = run_in(tmp_path / "a", *words, "aggregator=trimmed_mean", resume=True)
    assert caplog.text.count("round 2: aggregator=trimmed_mean leaves out the uploads of client 1, client 5,") == 1
    with (tmp_path / "a" / "costs.csv").open() as file:
        assert [row["left_out"] for row in csv.DictReader(file)] == ["0", "2", "2", "2"]
    assert summary["cost"]["left_out"] == 6
    assert torch.isfinite(checkpoint.load(tmp_path / "a")["algorithm"]["w"]).all()
    with pytest.raises(RunError, match=r"is not finite in round 3: optimizer\.lr="):
        run_in(tmp_path / "b", *words)
    assert "left_out" not in (tmp_path / "b" / "costs.csv").read_text()


def test_training_that_diverges_ends_the_run_with_a_rule_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"optimizer\.lr=1e"):
        run_in(tmp_path, "aggregator=median", "optimizer.lr=1e30")


# -- clipping to the median norm -----------------------------------------------------------------------------
@pytest.mark.parametrize("options", [[], ["client_weights=uniform"]])
def test_the_default_bound_is_the_median_norm_of_the_changes(options: list[str]) -> None:
    """By hand; a change of any size by one client moves the model by at most this norm."""
    e = replace(four_of_six(), client_weights="uniform" if options else "samples")
    cohort, w = cohort_of(with_rule(NormBound(), e)), e.model.init_row()
    change = torch.randn(4, len(w), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [2], [3], [1e6]])
    norms, weights = change.norm(dim=1), cohort.weights
    order = norms.argsort()
    above = weights[order].cumsum(0) >= 0.5 - 1e-6
    bound = (norms[1] + norms[2]) / 2 if options else norms[order][above][0]
    expected = w + (weights * (bound / norms).clamp_max(1)) @ change
    cohort.broadcast(w=w)
    close(cohort.mean(w + change, updates="w"), expected, 1e-4)
    for rule in (NormBound(), CenteredClipping()):
        close(rule.combine(Uploads(w.expand(3, -1), torch.full((3,), 1 / 3), 1, w)), w)


# -- means of a run --------------------------------------------------------------------------------------
def test_the_norm_of_a_round_is_bounded() -> None:
    e = with_rule(NormBound(bound=1e-3))
    w = play(e, FedAvg(), 1).w
    assert 0 < float((w - e.model.init_row()).norm()) <= 1.001e-3


# -- runs ------------------------------------------------------------------------------------------------
def run_in(folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return run(compose([*OPTIONS, *overrides]), folder, resume=resume)


@pytest.mark.parametrize(
    "words",
    [
        ["aggregator=krum", "aggregator.pre=bucketing", "aggregator.f=0.1", "aggregator.neighbors=n-f-1"],
        ["aggregator=centered_clipping", "aggregator.pre=nnm", "server=momentum"],
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "system.dropout=0.3"]
    run_in(tmp_path / "whole", *words)
    save = checkpoint.save

    def save_and_die(folder: Path, state: dict, *rest: Any) -> None:
        save(folder, state, *rest)
        if state["round"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run_in(tmp_path / "killed", *words)
    run_in(tmp_path / "killed", *words, resume=True)
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    whole, killed = (checkpoint.load(tmp_path / name)["algorithm"]["w"] for name in ("whole", "killed"))
    equal(whole, killed)


def test_a_method_without_means_is_refused_after_its_first_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aggregator=median has no effect: algorithm=apple does not average uploads"):
        run_in(tmp_path, "algorithm=apple", "aggregator=median")


def test_too_many_wrong_uploads_are_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aggregator\.f=2 assumes 2 wrong uploads, but with 6 clients a round this"):
        run_in(tmp_path, "aggregator=krum", "aggregator.f=2")


@pytest.mark.parametrize(
    "name, weights, count", [("krum", "samples", 1), ("krum", "uniform", 0), ("median", "samples", 0)]
)
def test_a_rule_without_weights_is_logged_once(
    name: str, weights: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run_in(tmp_path, f"aggregator={name}", f"client_weights={weights}", "rounds=2")
    assert caplog.text.count("treats all clients equally, whatever their numbers of samples") == count


def test_old_runs_keep_their_hash() -> None:
    cfg = compose(OPTIONS)
    old = to_dict(cfg)
    del old["aggregator"], old["choices"]["aggregator"]
    assert config_hash(old) == config_hash(cfg) != config_hash(compose([*OPTIONS, "aggregator=median"]))
    update_stored(old)
    assert old["aggregator"] == to_dict(cfg)["aggregator"] and old["choices"]["aggregator"] == "mean"
