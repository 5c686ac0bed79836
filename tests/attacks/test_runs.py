"""Attacks in runs: all methods, stopped runs, scored clients, summaries, the backdoor, and what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import COHORTS, METHODS_BY_SPEED, Case, assert_same, case, run_rounds, set_up, state_of
from tiny import compose, equal
from torch import Tensor

from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError, RunError
from fedbench.core.settings import config_hash, save_config, to_dict, update_stored
from fedbench.engine.cohort import Cohort
from fedbench.report.command import main as report
from fedbench.simulation import checkpoint
from fedbench.simulation.evaluate import personal_and_global
from fedbench.simulation.sampling import evaluated_clients
from fedbench.simulation.simulator import run
from fedbench.simulation.summary_text import ending_lines

OPTIONS = [
    *("algorithm=fedavg", "dataset=digits", "model=logistic", "partition.num_clients=8", "partition.alpha=1"),
    *("clients_per_round=6", "rounds=4", "local.epochs=1", "local.batch_size=16", "tracking=disabled"),
    *("hardware.device=cpu", "hardware.executor=vmap", "checkpoint.every=1", "optimizer.momentum=0.9"),
]
ATTACKS = [name for name in group_options("attack") if name != "none"]
ON_DATA = ["label_flip", "backdoor"]
# an attack of each kind on messages of each kind: models, parts of models, two uploads, gradients, control variates
AMONG = [("fedavg", "alie"), ("fedper", "foe"), ("ditto", "mimic"), ("pgfed", "ipm"), ("scaffold", "gaussian")]


def run_in(folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return run(compose([*OPTIONS, *overrides]), folder, resume=resume)


def attacked(method: str, name: str, *more: str) -> Case:
    """Return a method on the small federation, whose clients 0 and 3 attack."""
    words = [f"attack={name}", "attack.clients=[0,3]", *more]
    return case(method).on([*case(method).overrides, *words])


# -- methods ---------------------------------------------------------------------------------------------
def first_round(of: Case) -> tuple[bool, dict[str, Tensor]]:
    """Return whether clients uploaded tensors in a round, and all states after it."""
    sim = set_up(of.simulation())
    cohort = Cohort(sim.engine, np.array(COHORTS[0]), 0)
    sim.algorithm.round(cohort)
    return cohort.cost.takes_uploads, state_of(sim)


@pytest.mark.parametrize("method", METHODS_BY_SPEED)
def test_every_method_that_uploads_is_attacked(method: str) -> None:
    """The attack changes the states of those methods, and of no others."""
    used, state = first_round(attacked(method, "sign_flip", "attack.scale=1.5"))
    _, plain = first_round(case(method))
    changed = [name for name in plain if name not in state or not torch.equal(plain[name], state[name])]
    assert bool(changed) == used
    assert used == (method not in ("local", "zero_shot"))


@pytest.mark.parametrize("method, name", AMONG)
@pytest.mark.parametrize("more", [[], ["compression=qsgd", "compression.direction=both"], ["aggregator=median"]])
def test_executors_agree(method: str, name: str, more: list[str]) -> None:
    of = attacked(method, name, *more)
    one, all_at_once = (state_of(run_rounds(of.simulation(plan), 3)) for plan in ("loop", "vmap"))
    assert_same(one, all_at_once, 1e-4)


def test_the_reference_is_subtracted_and_weights_stay() -> None:
    """With scale 0, the attackers of FedAvg upload the server's model; their weights count."""
    sim = run_rounds(attacked("fedavg", "sign_flip", "attack.scale=0.0").simulation(), 1)
    plain = run_rounds(case("fedavg").simulation(), 1)
    cohort = Cohort(plain.engine, np.array(COHORTS[0]), 0)
    w = plain.engine.model.init_row()
    out = Cohort(set_up(case("fedavg").simulation()).engine, np.array(COHORTS[0]), 0).train(w)
    change = (out.theta - w) * torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None]  # clients 0, 1, 3, 5
    torch.testing.assert_close(sim.algorithm.w, w + cohort.weights @ change, rtol=1e-5, atol=1e-6)


# -- runs ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, name", [*AMONG, ("fedavg", "label_flip"), ("fedper", "backdoor")])
def test_a_killed_run_resumes_to_the_same_bytes(
    method: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"algorithm={method}", f"attack={name}", "attack.fraction=0.25", "aggregator=median", "model=mlp"]
    words += ["system.dropout=0.3", "compression=topk", "optimizer.momentum=0", "model.hidden=[8]"]
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
    for file in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    whole, killed = (checkpoint.load(tmp_path / folder)["rows"] for folder in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert any(key.startswith("attack/") for key in whole) == (name == "mimic")
    for key in whole:
        equal(whole[key]["rows"], killed[key]["rows"])


@pytest.mark.parametrize("name", ATTACKS)
def test_without_attackers_a_run_has_the_bytes_of_attack_none(name: str, tmp_path: Path) -> None:
    run_in(tmp_path / "none")
    summary = run_in(tmp_path / "nobody", f"attack={name}", "attack.fraction=0")
    assert "attack" not in summary
    for file in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "none" / file).read_bytes() == (tmp_path / "nobody" / file).read_bytes()


def test_only_honest_clients_are_scored(tmp_path: Path) -> None:
    summary = run_in(tmp_path, "attack=sign_flip", "attack.clients=[6,2]")
    assert summary["attack"]["name"] == "sign_flip" and list(summary["attack"]["attackers"]) == [2, 6]
    assert summary["num_clients"] == 8 and summary["evaluated_clients"] == 6
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored["attack"] == {"name": "sign_flip", "attackers": [2, 6]}
    clients = pd.read_csv(tmp_path / "clients.csv")
    assert set(clients["client"]) == {0, 1, 3, 4, 5, 7}
    line = "attack sign_flip: 2 attackers, clients 2, 6; scores of the 6 honest clients"
    assert f"  {line}" in ending_lines(stored, tmp_path)


def test_fewer_evaluated_clients_are_honest_too() -> None:
    cfg = compose([*OPTIONS, "attack=alie", "attack.clients=[0,1,2,3,4]", "eval.clients=2"])
    assert len(evaluated_clients(cfg, 8)) == 2 and set(evaluated_clients(cfg, 8)) <= {5, 6, 7}


def test_the_training_loss_is_that_of_honest_clients() -> None:
    """Clients 0 and 3 attack among 0, 1, 3 and 5; a round of attackers only has no loss."""
    sim = set_up(attacked("fedavg", "sign_flip").simulation())
    cohort = Cohort(sim.engine, np.array(COHORTS[0]), 0)
    out = cohort.train(sim.engine.model.init_row())
    assert cohort.cost.loss == pytest.approx(float(out.loss[[1, 3]].mean())) != pytest.approx(float(out.loss.mean()))
    only = Cohort(sim.engine, np.array([0, 3]), 0)
    only.train(sim.engine.model.init_row())
    assert np.isnan(only.cost.loss)


# -- the backdoor ----------------------------------------------------------------------------------------
def test_a_backdoor_succeeds_and_norm_bound_defends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It raises the success rate of the mean; with norm bounding, the rate is lower, and reports sort by it."""
    words = [
        "partition.alpha=100",
        "clients_per_round=8",
        "rounds=15",
        "optimizer.lr=0.1",
        "eval.every=15",
        "model=mlp",
    ]
    backdoor = ["attack=backdoor", "attack.clients=[1,2]", "attack.scale=2", "attack.target=3"]
    runs = {
        "clean": [*backdoor, "attack.scale=1e-9"],
        "mean": backdoor,
        "norm_bound": [*backdoor, "aggregator=norm_bound", "aggregator.bound=0.2"],
    }
    last = {name: run_in(tmp_path / name, *words, *more)["last"] for name, more in runs.items()}
    for name, more in runs.items():  # a report reads the configuration
        save_config(compose([*OPTIONS, *words, *more]), tmp_path / name / "config.yaml")
    for scope in ("personal", "global"):
        rate = {name: values[f"{scope}/attack_success"] for name, values in last.items()}
        assert rate["clean"] < 0.2 and rate["mean"] > 0.8 and rate["norm_bound"] < rate["mean"] - 0.3, rate
    assert last["mean"]["personal/accuracy"] > 0.8
    clients = pd.read_csv(tmp_path / "mean" / "clients.csv")
    assert clients["personal/attack_success"].mean() == pytest.approx(last["mean"]["personal/attack_success"])
    assert report([str(tmp_path), "--metric", "personal/attack_success"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:2] for line in lines if {"mean", "norm_bound"} & set(line.split()[:2])]
    assert rows == [["1e-09", "mean"], ["2", "norm_bound"], ["2", "mean"]]  # the lowest rate first


def test_the_weighted_success_rate_weighs_by_triggered_samples(tmp_path: Path) -> None:
    last = run_in(tmp_path, "attack=backdoor", "attack.target=1")["last"]
    clients = pd.read_csv(tmp_path / "clients.csv")
    clients = clients[clients["round"] == 4]
    mean = clients["personal/attack_success"].mean()
    assert last["personal/attack_success"] == pytest.approx(mean)
    assert last["personal/attack_success_worst"] == pytest.approx(clients["personal/attack_success"].max())
    by_test_samples = np.average(clients["personal/attack_success"], weights=clients["n_test"])
    assert last["personal/attack_success_weighted"] != pytest.approx(by_test_samples, rel=1e-6)


def test_the_success_rate_is_that_of_the_methods_own_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that always answers the target has the rate 1, whatever its model says."""
    sim = set_up(attacked("fedavg", "backdoor", "attack.target=1", "attack.size=1").simulation())
    honest = np.array([1, 2, 4, 5])

    def rates() -> np.ndarray:
        scopes, _ = personal_and_global(sim.algorithm, sim.engine, honest, 0, True)
        return scopes["personal"]["attack_success"]

    assert np.nanmin(rates()) < 1

    def target(model: Any, rows: Any, inputs: Any) -> Tensor:
        logits = torch.zeros_like(model.predict(rows, inputs))
        logits[..., 1] = 1
        return logits

    monkeypatch.setattr(sim.algorithm, "predict", target)
    assert np.nanmin(rates()) == 1


# -- options ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, message",
    [
        (["algorithm=local", "attack=alie"], "attack=alie has no effect: algorithm=local uploads nothing; use attack="),
        (["dataset=diabetes442", "model=mlp", "attack=label_flip"], "attack=label_flip changes classes"),
        (["attack=alie", "attack.clients=[8]"], r"attack\.clients=\[8\] must be different training clients, from 0"),
        (["attack=mimic", "attack.clients=[1]", "attack.client=1"], r"attack\.client=1 must be an honest training"),
        (["new_clients.count=2", "attack=alie", "attack.clients=[6]"], r"different training clients, from 0 to 5"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_in(tmp_path, *words)


def test_label_flip_attacks_methods_without_uploads(tmp_path: Path) -> None:
    assert run_in(tmp_path, "algorithm=local", "attack=label_flip")["status"] == "finished"


def test_a_run_that_diverges_names_the_attack(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="probably because of the attack: use a rule that withstands it, for example"):
        run_in(tmp_path, "attack=gaussian", "attack.std=1e20")


def test_new_clients_and_export_work(tmp_path: Path) -> None:
    summary = run_in(tmp_path, "new_clients.count=2", "new_clients.epochs=1", "attack=backdoor", "attack.clients=[0]")
    assert summary["new_clients"]["count"] == 2 and summary["evaluated_clients"] == 5


def test_the_log_names_the_attackers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_in(tmp_path, "attack=alie", "attack.clients=[5]", "rounds=1")
    assert caplog.text.count("attack alie: 1 attacker, client 5; scores of the 7 honest clients") == 1


def test_old_runs_keep_their_hash() -> None:
    cfg = compose(OPTIONS)
    old = to_dict(cfg)
    del old["attack"], old["choices"]["attack"]
    assert config_hash(old) == config_hash(cfg) != config_hash(compose([*OPTIONS, "attack=alie"]))
    update_stored(old)
    assert old["attack"] == to_dict(cfg)["attack"] and old["choices"]["attack"] == "none"
