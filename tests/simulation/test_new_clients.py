"""Clients that take no part in the rounds, and adapt the global model afterwards."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tiny import HEAD, Affine, Point, close, compose, engine, engine_on, equal, mlp, play, ragged, targets_federation

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.local import Local
from fedbench.config.check import check
from fedbench.core import rng
from fedbench.core.options import ConfigError, RunError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.optim import SGD
from fedbench.report import scores
from fedbench.report.paper_metrics import METRICS, PrintedCell
from fedbench.report.runs import Run
from fedbench.simulation import build, new_clients, simulator

SMALL = [
    "hardware=cpu",
    "hardware.executor=vmap",
    "tracking=disabled",
    "rounds=3",
    "partition.num_clients=8",
    "new_clients.count=3",
    "new_clients.epochs=2",
    "local.epochs=1",
]


def config(*overrides: str) -> OmegaConf:
    return OmegaConf.create(check(compose([*SMALL, *overrides])))


def run(folder: Path, *overrides: str, resume: bool = False) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    return simulator.run(config(*overrides), folder, resume)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / new_clients.FILE).open() as file:
        return list(csv.DictReader(file))


def with_newcomers(e: Engine, count: int) -> Engine:
    """The engine of a federation whose last clients are new."""
    old = e.federation.select_clients(np.arange(e.federation.num_clients - count))
    return replace(e, federation=old, with_new_clients=e.federation)


def test_the_last_clients_are_not_in_the_federation_that_trains() -> None:
    cfg = config(
        "sample_rate=0.4",
        "dataset=synthetic",
        "dataset.num_domains=8",
        "partition=domain",
        "partition.num_clients=null",
    )
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    e = build.engine(cfg, arrays, split)
    assert (e.federation.num_clients, e.with_new_clients.num_clients, e.federation.cohort_size) == (5, 8, 2)
    for part in ("train", "val", "test"):
        for i in range(5):
            np.testing.assert_array_equal(e.federation.splits[part][i], getattr(split, part)[i])
    assert e.federation.inputs is e.with_new_clients.inputs
    assert len(e.federation.domains) == len(e.federation.label_counts) == e.rows.num_clients == 5


def test_a_federation_among_some_of_the_clients_keeps_what_is_theirs() -> None:
    arrays, split = ragged((4, 5, 6, 7))
    arrays.domain = np.concatenate([split.train.owners(), split.test.owners()])
    arrays.class_mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], bool)
    whole = engine(arrays, split, mlp()).federation
    some = whole.select_clients(np.array([3, 1]))
    assert some.num_samples.tolist() == [7, 5] and some.domains.tolist() == [3, 1]
    assert some.class_mask.tolist() == [[False, True, True], [True, True, False]]
    some.hold_out(0.5)
    assert "held_out" not in whole.splits


@pytest.mark.parametrize("count", [8, 9])
def test_somebody_has_to_train(count: int) -> None:
    words = f"new_clients.count={count} must be less than the number of clients, 8"
    with pytest.raises(ConfigError, match=words):
        config(f"new_clients.count={count}")
    cfg = config()
    arrays = build.data(cfg)
    cfg.new_clients.count = count  # as where only the data say how many clients there are
    with pytest.raises(ConfigError, match=words):
        build.engine(cfg, arrays, build.partition(cfg, arrays))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_what_new_clients_hold_changes_nothing_in_the_rounds(method: str, tmp_path: Path, monkeypatch) -> None:
    """Other labels on new clients' samples: the same metrics, byte for byte, and other new_clients.csv."""
    run(tmp_path / "a", f"algorithm={method}")
    cfg = config()
    own = build.partition(cfg, build.data(cfg)).train.select([5, 6, 7]).indices
    real = build.data

    def other(c):
        arrays = real(c)
        arrays.targets[own] = (arrays.targets[own] + 1) % arrays.num_classes
        return arrays

    split = build.partition(cfg, build.data(cfg))
    monkeypatch.setattr(build, "data", other)
    monkeypatch.setattr(build, "partition", lambda c, a: split)
    run(tmp_path / "b", f"algorithm={method}")
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / new_clients.FILE).read_bytes() != (tmp_path / "b" / new_clients.FILE).read_bytes()


def test_adaptation_by_hand(monkeypatch) -> None:
    """f(theta) = 0.5 ||theta - m||^2 and one batch an epoch: with a fresh optimizer momentum never acts, and after
    e epochs theta = m + (1 - lr)^e (w - m), whose mean loss is 0.5 ||theta - m||^2 + 0.5 var."""
    m = np.array([1.0, -2.0])
    e = engine_on(
        targets_federation([np.zeros((4, 2)), m + np.zeros((3, 2)), np.ones((5, 2))]), Point([5.0, 6.0]), batch_size=10
    )
    e = with_newcomers(e, 2)
    losses = []

    def score(cohort, rows, predict, split):
        losses.append(cohort.loss(rows, split).numpy())
        return {"accuracy": np.zeros(len(cohort))}

    monkeypatch.setattr(new_clients.evaluate, "score", score)
    ids, curves = new_clients.adapt(e, torch.tensor([5.0, 6.0]), 3, 0.25, 0.9)
    assert ids.tolist() == [1, 2] and curves["accuracy"].shape == (4, 2)
    for epoch, loss in enumerate(losses):
        for client, mean in enumerate([m, np.ones(2)]):
            theta = mean + 0.75**epoch * (np.array([5.0, 6.0]) - mean)
            assert loss[client] == pytest.approx(0.5 * ((theta - mean) ** 2).sum(), rel=1e-5)


def test_every_epoch_is_shuffled_anew(monkeypatch) -> None:
    drawn, batches = [], rng.batches

    def draw(*args, **how):
        drawn.append(batches(*args, **how))
        return drawn[-1]

    monkeypatch.setattr(rng, "batches", draw)
    e = with_newcomers(engine(*ragged(), mlp()), 2)
    new_clients.adapt(e, e.model.init_row(), 3, 0.1, 0.0)
    assert len({position.tobytes() for position, _ in drawn}) == len(drawn) == 3


def test_momentum_acts_within_an_epoch_and_not_across() -> None:
    """Two batches an epoch, both of gradient 1: velocities 1 and 1.9; the next epoch begins anew."""
    y = np.ones((2, 1))
    e = engine_on(targets_federation([y, y], Affine()), Point([0.0]), SGD(0.1, momentum=0.9), batch_size=1)
    row = torch.zeros(1)
    for epoch in range(2):
        row = new_clients._epoch(Cohort(e, np.array([1]), epoch), row)
    close(row, torch.tensor([[-2 * 0.1 * (1 + 1.9)]]))


def trained(algorithm, **options) -> tuple[Engine, object]:
    e = with_newcomers(engine(*ragged(), mlp(), columns=HEAD, **options), 2)
    e.federation.cohort_size = 2
    return e, play(e, algorithm, 2, cohorts=[[0, 2], [1, 2]])


def test_a_method_with_a_global_model_hands_it_on() -> None:
    e, method = trained(FedAvg())
    equal(new_clients.starting_row(method, e), method.w)
    tuned = FineTuned(method, 2, None, "evaluation", "all")
    equal(new_clients.starting_row(tuned, e), method.w)


@pytest.mark.parametrize("limit", [1 << 28, 1])
@pytest.mark.parametrize("make, shared, where", [(FedPer, "u", "base"), (LGFedAvg, "h", "head")])
def test_parts_that_never_reach_the_server_are_averaged(make, shared, where, limit, monkeypatch) -> None:
    """The shared part is the server's; the other is the mean over all old clients, weighted by their samples."""
    e, method = trained(make())
    monkeypatch.setattr(new_clients.evaluate, "SLICE_BYTES", limit)
    row = new_clients.starting_row(method, e)
    mine, other = method.__dict__[where], method.__dict__[where].rest(e.model.size)
    close(mine.take(row), getattr(method, shared))
    n = torch.from_numpy(e.federation.num_samples).float()
    everyone = method.personalized(Cohort(e, np.arange(4), 0, "evaluation"), True)
    close(other.take(row), n / n.sum() @ other.take(everyone))
    (kept,) = e.rows.all.values()
    assert kept.touched().tolist() == [0, 1, 2]


def test_local_starts_from_the_initialization() -> None:
    e, method = trained(Local())
    equal(new_clients.starting_row(method, e), e.model.init_row())


def test_files_and_summary(tmp_path: Path) -> None:
    found = run(tmp_path / "run")["new_clients"]
    rows = rows_of(tmp_path / "run")
    assert [(r["epoch"], r["client"]) for r in rows] == [(str(e), str(c)) for e in range(3) for c in (5, 6, 7)]
    curve = [np.mean([float(r["accuracy"]) for r in rows if r["epoch"] == str(e)]) for e in range(3)]
    assert found == {
        "count": 3,
        "epochs": 2,
        "epoch0": pytest.approx(curve[0]),
        "best": pytest.approx(max(curve)),
        "best_epoch": int(np.argmax(curve)),
        "last": pytest.approx(curve[2]),
    }
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["num_clients"] == 5 and saved["new_clients"] == found
    row = {"metric": "best_mean_client_test_accuracy_pct_on_20_new_clients", "dataset": "CIFAR10", "setting": ""}
    answer = METRICS[row["metric"]](Run(tmp_path / "run"), PrintedCell("pgfed_new_clients", row))
    assert answer.value == pytest.approx(100 * max(curve))
    assert scores.rounds_to(Run(tmp_path / "run"), "personal/accuracy", 0.0) == 1


def test_a_run_without_new_clients_says_nothing_of_them(tmp_path: Path) -> None:
    assert "new_clients" not in run(tmp_path / "run", "new_clients.count=0")
    assert not (tmp_path / "run" / new_clients.FILE).exists()


def test_an_interrupted_adaptation_is_done_anew(tmp_path: Path, monkeypatch) -> None:
    run(tmp_path / "whole")

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(new_clients, "_epoch", stop)
        run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "running"
    run(tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_a_learning_rate_that_diverges_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"adaptation of new clients.*new_clients\.lr=1e\+12"):
        run(tmp_path / "run", "new_clients.lr=1e12")
