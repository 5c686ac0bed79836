"""Devices that are lost in a round, and slow ones: whom it hits, what it costs, and what stays as it was."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tiny import compose

from fedbench.config.check import check
from fedbench.core import rng
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash, to_dict, update_stored
from fedbench.core.split import Split
from fedbench.engine.cohort import Cohort
from fedbench.engine.training import LocalTraining
from fedbench.simulation.callbacks.checkpoint import Checkpoint
from fedbench.simulation.sampling import draw_cohort, participants, step_fractions
from fedbench.simulation.simulator import prepare, run, run_round

OPTIONS = [
    *("dataset=digits", "model=logistic", "partition.num_clients=6", "partition.alpha=1", "clients_per_round=4"),
    *("rounds=6", "local.epochs=2", "local.batch_size=16", "tracking=disabled", "hardware.device=cpu"),
    *("hardware.executor=vmap", "checkpoint.every=1", "optimizer.momentum=0.9", "optimizer.reset=never"),
]
LOST = ["system.dropout=0.5"]
SLOW = ["system.slow=0.5", "system.slow_steps=0.3"]
METHODS = ["pgfed", "fedrep", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedavg", "scaffold", "apple"))]
SIZE = 64 * 10 + 10


def config(*overrides: str) -> DictConfig:
    """OPTIONS, but for what is given, and for what a method needs: plain SGD, or a base beside the head."""
    needs = {"algorithm=scaffold": ["optimizer.momentum=0", "optimizer.reset=round"], "algorithm=fedrep": ["model=mlp"]}
    more = [word for method, words in needs.items() if method in overrides for word in words]
    words = dict(word.split("=", 1) for word in [*OPTIONS, *more, *overrides])
    return compose([f"{key}={value}" for key, value in words.items()])


def table(folder: Path, name: str = "costs") -> list[dict[str, Any]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rounds(cfg: DictConfig, folder: Path, upto: int) -> Any:
    folder.mkdir(exist_ok=True)
    sim = prepare(cfg, folder, None)
    for _ in range(upto):
        run_round(sim, [])
    return sim


def first_round(wanted: Any, dropout: float = 0.5) -> int:
    """The first round in which so many of the drawn clients survive."""
    return next(r for r in range(200) if wanted(len(participants(0, r, draw_cohort(0, r, 6, 4), dropout))))


# -- who ---------------------------------------------------------------------------------------------------
def test_every_client_is_lost_by_its_own_chance() -> None:
    """Whoever else was drawn; with 0 nobody; the more often, the more are lost, and none comes back."""
    ids = np.arange(1000)
    left = participants(3, 7, ids, 0.3)
    assert 650 < len(left) < 750 and participants(3, 7, ids, 0.0).tolist() == ids.tolist()
    assert participants(3, 7, ids[::2], 0.3).tolist() == [i for i in left if i % 2 == 0]
    assert {*participants(3, 7, ids, 0.6)} < {*left} != {*participants(3, 8, ids, 0.3)}
    assert participants(3, 7, ids, 0.3).tolist() != participants(4, 7, ids, 0.3).tolist()


def test_slow_ones_are_the_same_throughout_the_run() -> None:
    cfg = config(*SLOW)
    each = step_fractions(cfg, 6)
    assert each is not None and sorted(each.tolist()) == [0.3, 0.3, 0.3, 1, 1, 1]
    assert (
        step_fractions(config(*SLOW, "algorithm=fedavg"), 6).tolist() == each.tolist()
        and step_fractions(config(), 6) is None
    )
    others = [step_fractions(config(*SLOW, f"seed={seed}"), 6) for seed in range(1, 9)]
    assert any(other.tolist() != each.tolist() for other in others if other is not None)
    assert (step_fractions(config("system.slow=0.5"), 5) < 1).sum() == 3
    with pytest.raises(ConfigError, match=r"system\.slow=0\.05 of 6 clients rounds to no client"):
        step_fractions(config("system.slow=0.05"), 6)


def test_a_slow_client_does_the_first_of_its_batches() -> None:
    """A share, rounded up; the batches themselves are those it would have had."""
    ids, sizes, share = np.array([2, 5, 9]), np.array([10, 7, 0]), np.array([1.0, 0.3, 0.3])
    whole, counted = rng.batches(1, ids, sizes, 4, epochs=2)
    slow, few = rng.batches(1, ids, sizes, 4, epochs=2, step_fraction=share)
    steps, samples = rng.lengths(sizes, 4, epochs=2, step_fraction=share)
    assert steps.tolist() == [6, 2, 0] and samples.tolist() == [20, 7, 0] == few.sum(0).tolist()
    np.testing.assert_array_equal(slow[:, 0], whole[:, 0])
    np.testing.assert_array_equal(slow[:2, 1], whole[:2, 1])
    assert not few[2:, 1].any() and counted[2:, 1].any()
    hundred = {"steps": 100, "step_fraction": np.array([0.07, 0.071])}
    assert rng.lengths(np.array([50, 50]), 4, **hundred)[0].tolist() == [7, 8]


def test_a_slow_client_trains_by_no_more(tmp_path: Path) -> None:
    """Its row is that of as many steps, and it is what a method is told."""
    sim = rounds(config("algorithm=fedavg", *SLOW, "optimizer.momentum=0", "optimizer.reset=round"), tmp_path, 0)
    row, whole = sim.algorithm.global_row(), rng.lengths(sim.engine.federation.num_samples, 16, epochs=2)[0]
    cohort = Cohort(sim.engine, np.arange(6), 0)
    found, steps = cohort.train(row.expand(6, -1)).theta, cohort.num_steps
    assert sim.engine.step_fraction is not None
    assert steps.tolist() == np.ceil(whole * sim.engine.step_fraction).tolist() and (steps < whole).sum() == 3
    for i in range(6):
        quick = Cohort(sim.engine, np.array([i]), 0, "evaluation")  # nobody is slow outside of rounds
        assert quick.num_steps[0] == whole[i]
        alone = quick.train(row[None], how=LocalTraining(steps=int(steps[i]))).theta[0]
        torch.testing.assert_close(found[i], alone, atol=1e-6, rtol=0)


# -- what it costs, and what it changes ------------------------------------------------------------------
def test_the_lost_have_downloaded_and_neither_trained_nor_sent(tmp_path: Path) -> None:
    """FedAvg: bytes and samples by hand, and the mean of a round by its survivors alone."""
    cfg = config("algorithm=fedavg", *LOST, "eval.every=6")
    run(cfg, tmp_path)
    split = Split.load(tmp_path / "partition.npz")
    for r, row in enumerate(table(tmp_path)):
        left = participants(0, r, draw_cohort(0, r, 6, 4), 0.5)
        assert int(row["bytes_down"]) == (4 * 4 * SIZE if len(left) else 0)
        assert int(row["bytes_up"]) == 4 * SIZE * len(left)
        assert int(row["samples"]) == 2 * split.train.sizes[left].sum()
        assert (int(row["cohort"]), int(row["survivors"])) == (4, len(left))


def test_what_all_are_asked_before_is_charged_once(tmp_path: Path) -> None:
    """FedSLD's counts, of six clients whoever is lost: ten numbers up and the sum down; models of the four drawn."""
    r = first_round(lambda n: 1 < n < 4)
    left = participants(0, r, draw_cohort(0, r, 6, 4), 0.5)
    sim = rounds(config("algorithm=fedsld", *LOST), tmp_path, 0)
    sim.done = r
    run_round(sim, [])
    counts = 4 * 10 * 6
    assert (sim.cost["bytes_up"], sim.cost["bytes_down"]) == (counts + 4 * SIZE * len(left), counts + 4 * SIZE * 4)


def test_weights_are_over_survivors(tmp_path: Path) -> None:
    r = first_round(lambda n: 1 < n < 4)
    left = participants(0, r, draw_cohort(0, r, 6, 4), 0.5)
    sim = rounds(config("algorithm=fedavg", *LOST, "optimizer.momentum=0", "optimizer.reset=round"), tmp_path, r)
    trained = Cohort(sim.engine, left, r)
    rows = trained.train(sim.algorithm.global_row().expand(len(left), -1)).theta.double()
    n = torch.from_numpy(sim.engine.federation.num_samples[left]).double()
    run_round(sim, [])
    torch.testing.assert_close(sim.algorithm.global_row().double(), n @ rows / n.sum(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_private_rows_of_the_lost_stay(method: str, tmp_path: Path) -> None:
    """Whoever is not among the survivors has the rows and buffers of the round before; survivors have others."""
    r = first_round(lambda n: n == 2)
    left = participants(0, r, draw_cohort(0, r, 6, 4), 0.5)
    sim = rounds(config(f"algorithm={method}", *LOST), tmp_path, r)
    others = np.setdiff1d(np.arange(6), left)
    before = {name: rows[others].clone() for name, rows in sim.engine.rows.all.items()}
    theirs = {name: rows[left].clone() for name, rows in sim.engine.rows.all.items()}
    run_round(sim, [])
    for name, rows in before.items():
        assert torch.equal(sim.engine.rows.all[name][others], rows), name
    assert not theirs or any(not torch.equal(sim.engine.rows.all[n][left], rows) for n, rows in theirs.items())


@pytest.mark.parametrize("method", METHODS)
def test_a_round_without_any_leaves_all_as_it_was(method: str, tmp_path: Path) -> None:
    r = first_round(lambda n: n == 0, 0.8)
    sim = rounds(config(f"algorithm={method}", "system.dropout=0.8", f"rounds={r + 2}", "eval.every=1000"), tmp_path, r)
    state = {name: value.clone() for name, value in sim.algorithm.state_dict().items()}
    rows = {name: each[np.arange(6)].clone() for name, each in sim.engine.rows.all.items()}
    cost = dict(sim.cost)
    run_round(sim, [])
    assert all(torch.equal(sim.algorithm.state_dict()[name], value) for name, value in state.items())
    assert all(torch.equal(sim.engine.rows.all[name][np.arange(6)], value) for name, value in rows.items())
    assert sim.done == r + 1 and sim.cost["bytes_down"] == cost["bytes_down"] and sim.cost["steps"] == cost["steps"]


@pytest.mark.parametrize("method", METHODS)
def test_slow_ones_do_their_share_whoever_says_how_much(method: str, tmp_path: Path) -> None:
    """FedRep trains head and body for epochs of its own, PGFed and APPLE have steps of their own."""
    count = {}
    for name, words in (("whole", []), ("slow", SLOW)):
        sim = rounds(config(f"algorithm={method}", "clients_per_round=6", "rounds=1", *words), tmp_path / name, 1)
        count[name] = sim.cost["steps"]
    whole = rng.lengths(sim.engine.federation.num_samples, 16, epochs=2)[0]
    slow = np.ceil(whole * sim.engine.step_fraction).astype(int)
    if method == "fedrep":
        epochs = config("algorithm=fedrep").algorithm.head_epochs
        head = rng.lengths(sim.engine.federation.num_samples, 16, epochs=epochs)[0]
        whole, slow = whole + head, slow + np.ceil(head * sim.engine.step_fraction).astype(int)
    assert (count["whole"], count["slow"]) == (whole.sum(), slow.sum()) and slow.sum() < whole.sum()


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_and_another_executor_lose_the_same(method: str, tmp_path: Path) -> None:
    cfg = config(f"algorithm={method}", "system.dropout=0.3", *SLOW, "rounds=4")
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    run(cfg, tmp_path / "whole")
    sim = rounds(cfg, tmp_path / "again", 2)
    Checkpoint(None).save(sim)
    for executor in ("loop", "threads"):
        executed = ["system.dropout=0.3", *SLOW, f"hardware.executor={executor}"]
        other = rounds(config(f"algorithm={method}", *executed), tmp_path / executor, 2)
        for name, value in sim.algorithm.state_dict().items():
            torch.testing.assert_close(other.algorithm.state_dict()[name], value, atol=1e-5, rtol=1e-4)
    run(cfg, tmp_path / "again", resume=True)
    assert table(tmp_path / "whole", "metrics")[2:] == table(tmp_path / "again", "metrics")


# -- keys ------------------------------------------------------------------------------------------------
def test_old_runs_keep_their_hash_and_go_on() -> None:
    cfg = config()
    old = to_dict(cfg)
    del old["system"]
    assert config_hash(old) == config_hash(cfg) != config_hash(config(*LOST))
    update_stored(old)
    assert old["system"] == {"dropout": 0.0, "slow": 0.0, "slow_steps": 0.5, "fewest_epochs": None}


@pytest.mark.parametrize("words", ["system.dropout=1", "system.slow=-0.1", "system.slow_steps=0", "system.lost=0.1"])
def test_mistakes_are_one_sentence(words: str) -> None:
    with pytest.raises(ConfigError, match=words.partition("=")[0]):
        check(config(words))


def test_the_cohort_of_a_summary_is_the_drawn_ones(tmp_path: Path) -> None:
    run(config("algorithm=fedavg", *LOST, "rounds=1"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["cohort"] == 4


# -- epochs of each client -----------------------------------------------------------------------------------
EACH = [1, 2, 3, 1, 2, 3]


def test_a_list_gives_each_client_its_epochs(tmp_path: Path) -> None:
    """Rows and steps are those of trainings with one number for all."""
    plain_sgd = ["algorithm=fedavg", "optimizer.momentum=0", "optimizer.reset=round"]
    sim = rounds(config(*plain_sgd, f"local.epochs={EACH}"), tmp_path, 0)
    row, ids = sim.algorithm.global_row(), np.array([1, 2, 3])
    cohort = Cohort(sim.engine, ids, 0)
    found = cohort.train(row)
    per_epoch = -(-sim.engine.federation.num_samples[ids] // 16)
    assert cohort.num_steps.tolist() == found.steps.tolist() == (per_epoch * [2, 3, 1]).tolist()
    for k, epochs in enumerate([2, 3, 1]):
        alone = Cohort(sim.engine, ids[k : k + 1], 0).train(row, how=LocalTraining(epochs=epochs))
        torch.testing.assert_close(found.theta[k], alone.theta[0], atol=1e-6, rtol=0)
    own = cohort.train(row, how=LocalTraining(epochs=1)).steps  # whoever says a number himself has that
    assert own.tolist() == per_epoch.tolist()


def test_local_steps_replace_epochs(tmp_path: Path) -> None:
    """Every client takes the same number of steps, unless the method gives its own number of epochs."""
    sim = rounds(config("algorithm=fedavg", "local.steps=7"), tmp_path, 0)
    cohort = Cohort(sim.engine, np.array([1, 2, 3]), 0)
    assert cohort.num_steps.tolist() == cohort.train(sim.algorithm.global_row()).steps.tolist() == [7, 7, 7]
    per_epoch = -(-sim.engine.federation.num_samples[cohort.ids] // 16)
    how = LocalTraining(epochs=1)
    assert cohort.train(sim.algorithm.global_row(), how=how).steps.tolist() == per_epoch.tolist()


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps(tmp_path: Path) -> None:
    sim = rounds(config("algorithm=fedavg", "local.epochs=[0.5,1.5,0.01,1,2,0.3]"), tmp_path, 0)
    cohort = Cohort(sim.engine, np.arange(6), 0)
    per_epoch = -(-sim.engine.federation.num_samples // 16)
    expected = np.ceil(per_epoch * np.array([0.5, 1.5, 0.01, 1, 2, 0.3]) - 1e-9)
    assert cohort.num_steps.tolist() == cohort.train(sim.algorithm.global_row()).steps.tolist() == expected.tolist()


@pytest.mark.parametrize("method", ["pgfed_ce", "fedrep", pytest.param("apple", marks=pytest.mark.slow)])
def test_equal_numbers_in_a_list_are_one_number(method: str, tmp_path: Path) -> None:
    finals = []
    for name, epochs in (("list", [2] * 6), ("one", 2)):
        (tmp_path / name).mkdir()
        run(config(f"algorithm={method}", f"local.epochs={epochs}", "rounds=2"), tmp_path / name)
        finals.append([{**r, "time": ""} for r in table(tmp_path / name, "clients")])
    assert finals[0] == finals[1]


def test_epochs_are_drawn_anew_in_each_round_for_all_methods_alike(tmp_path: Path) -> None:
    """From system.fewest_epochs to the client's own most, each as often; as many again outside of rounds."""
    engines = {
        m: rounds(config(f"algorithm={m}", "local.epochs=4", "system.fewest_epochs=2"), tmp_path / m, 0).engine
        for m in ("fedavg", "pgfed")
    }
    drawn = {m: [Cohort(e, np.arange(6), t).epochs.tolist() for t in range(200)] for m, e in engines.items()}
    assert drawn["fedavg"] == drawn["pgfed"]
    counts = np.bincount(np.ravel(drawn["fedavg"]), minlength=6)
    assert counts[[0, 1, 5]].sum() == 0 and (abs(counts[2:5] - 400) < 60).all()
    engine = engines["fedavg"]
    assert Cohort(engine, np.array([3, 5]), 7).epochs.tolist() == [drawn["fedavg"][7][i] for i in (3, 5)]
    assert Cohort(engine, np.arange(6), 7, "evaluation").epochs == 4
    per_epoch = -(-engine.federation.num_samples // 16)
    assert Cohort(engine, np.arange(6), 7).num_steps.tolist() == (per_epoch * drawn["fedavg"][7]).tolist()


def test_a_run_with_drawn_epochs_resumes(tmp_path: Path) -> None:
    cfg = config("algorithm=pgfed", f"local.epochs={EACH}", "system.fewest_epochs=1", "rounds=4")
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    run(cfg, tmp_path / "whole")
    Checkpoint(None).save(rounds(cfg, tmp_path / "again", 2))
    run(cfg, tmp_path / "again", resume=True)
    assert table(tmp_path / "whole", "metrics")[2:] == table(tmp_path / "again", "metrics")
    assert len({r["steps"] for r in table(tmp_path / "whole")}) > 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["local.epochs=1.5", "system.fewest_epochs=1"], "local.epochs must be whole, got 1.5"),
        (["local.steps=3", "system.fewest_epochs=1"], "so local.steps must be null, got 3"),
        (["local.epochs=[1,2]"], "local.epochs lists 2 numbers, and there are 6 clients to train"),
        (["local.epochs=2", "system.fewest_epochs=3"], "system.fewest_epochs=3 must be at most local.epochs=2"),
        ([f"local.epochs={EACH}", "system.fewest_epochs=2"], "system.fewest_epochs=2 must be at most local.epochs="),
    ],
)
def test_impossible_epochs_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("[", r"\[")):
        check(config(*words))
