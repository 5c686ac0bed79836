"""--choose: every client gets the value that its own validation part prefers, and the sentence to paste is a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from run_folders import make_run
from tiny import compose

from fedbench.config.check import check
from fedbench.core.settings import save_config
from fedbench.report.choose import best_values, choose, override
from fedbench.report.command import main
from fedbench.report.runs import find_runs
from fedbench.report.table import Spread
from fedbench.simulation.simulator import run

NAN = float("nan")
VAL = {0.1: [0.9, 0.5, 0.6, 0.2], 0.5: [0.8, 0.5, 0.7, 0.6], 2: [0.8, 0.1, 0.9, 0.6]}  # averages 0.55, 0.65, 0.6
TEST = {0.1: [0.80, 0.40, 0.5, 0.3], 0.5: [0.85, 0.44, 0.6, 0.5], 2: [0.7, 0.2, 0.7, 0.9]}


def make(
    folder: Path,
    mu: Any,
    seed: int = 0,
    val: list[float] | None = None,
    test: list[float] | None = None,
    config: dict | None = None,
    summary: dict | None = None,
) -> Path:
    """A finished run of four clients; in its first round all have the accuracy that others prefer."""
    key = mu if isinstance(mu, float | int) else None
    test, val = ((table.get(key, [0.5] * 4) if given is None else given) for table, given in ((TEST, test), (VAL, val)))
    rounds = (np.array([each[::-1], each]) if each else None for each in (test, val))
    return make_run(folder, "pgfed", seed, (), "finished", {"algorithm": {"mu": mu}} | (config or {}), summary, *rounds)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for mu in VAL:
        make(tmp_path / "sweep", mu)
    return tmp_path / "sweep"


def test_each_client_takes_what_its_validation_part_prefers(sweep, capsys):
    """Client 1 is as well off under 0.1 and 0.5, client 3 under 0.5 and 2: 0.5 is better on average."""
    table = choose(find_runs([sweep]), "algorithm.mu")
    clients = {row["value"]: row["clients"] for row in table.rows}
    assert clients == {"0.1": 1, "0.5": 2, "2": 1, "each its own": 4}
    val = [row["val"].mean for row in table.rows]
    assert val == pytest.approx([0.55, 0.65, 0.6, (0.9 + 0.5 + 0.9 + 0.6) / 4])
    test = [row["test"].mean for row in table.rows]
    assert test == pytest.approx([0.5, 0.5975, 0.625, (0.80 + 0.44 + 0.7 + 0.5) / 4])
    assert main([str(sweep), "--choose", "algorithm.mu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("personal/accuracy (%): algorithm.mu by each client's own validation part, 1 seed\n")
    assert text.endswith("\n'algorithm.mu=[0.1,0.5,2,0.5]'\n")
    assert "2 of 4 clients had several best values" in text
    assert "each its own        4       72.50  61.00" in text


def test_scores_are_means_over_seeds(sweep):
    """With a second seed client 0 prefers 2 on average: (0.8 + 1.0) / 2 above (0.9 + 0.2) / 2; and 2 is best on
    average, which client 3 cannot tell from 0.5."""
    for mu, first in ((0.1, 0.2), (0.5, 0.1), (2, 1.0)):
        make(sweep, mu, 1, [first, *VAL[mu][1:]], [0.1, *TEST[mu][1:]])
    table = choose(find_runs([sweep]), "algorithm.mu")
    assert table.notes[-1] == "'algorithm.mu=[2,0.5,2,2]'"
    own = table.rows[-1]["test"]
    by_seed = [(0.7 + 0.44 + 0.7 + 0.9) / 4, (0.1 + 0.44 + 0.7 + 0.9) / 4]
    assert own == Spread(pytest.approx(np.mean(by_seed)), pytest.approx(np.std(by_seed)), 2, 2)
    assert table.title.endswith("2 seeds")


def test_of_repeated_runs_the_latest_counts_and_lists_do_not(sweep):
    make(sweep, 2, val=[0.0] * 4, summary={"finished": "2025-01-01"})
    make(sweep, [0.1, 0.5, 2, 0.5])
    make(sweep, 7.0, summary={"status": "running"})
    assert choose(find_runs([sweep]), "algorithm.mu").notes[-1] == "'algorithm.mu=[0.1,0.5,2,0.5]'"
    make(sweep, 2, val=[0.0] * 4, summary={"finished": "2027-01-01"})
    assert choose(find_runs([sweep]), "algorithm.mu").notes[-1] == "'algorithm.mu=[0.1,0.5,0.5,0.5]'"


def test_choice_of_losses_and_of_what_is_not_known():
    val = pandas.DataFrame([[1.0, 2.0, NAN, 1.0], [2.0, 1.0, NAN, 1.0], [2.0, 0.5, NAN, NAN]])
    found, tied = best_values(val, lower_is_better=True)
    assert found.tolist() == [0, 2, 2, 0] and tied == 2  # average losses 1.33, 1.33, 1.25
    found, tied = best_values(pandas.DataFrame([[0.1 + 0.2, 0.0], [0.3, 1.0]]))  # 0.1 + 0.2 is 0.30000000000000004
    assert found.tolist() == [1, 1] and tied == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"val": []}, "no column val/accuracy; set dataset.val_fraction, e.g. 0.2"),
        (
            {"config": {"rounds": 5, "algorithm": {"mu": 3.0, "beta": 1}}},
            "runs differ in rounds, algorithm.beta too",
        ),
        (
            {"config": {"choices": {"algorithm": "pgfed_ce"}}},
            "runs differ in algorithm too; give folders whose runs",
        ),
        ({"summary": {"partition_hash": "p1"}}, "2 different partitions (partition_hash in"),
        ({"seed": 1}, "no finished run of algorithm.mu=0.1 seed=1, algorithm.mu=0.5 seed=1"),
        ({"summary": {"num_clients": 5}}, "evaluated 4 of its 5 clients"),
        ({"val": [NAN] * 4}, "has a val/accuracy; choose another --metric"),
    ],
)
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_runs_that_cannot_be_compared_are_refused(sweep, capsys, change, sentence):
    make(sweep, 3.0, **change)
    assert main([str(sweep), "--choose", "algorithm.mu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedbench: --choose algorithm.mu: ") and said.count("\n") == 1
    assert sentence in said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--choose", "algorithm.eta2"], "needs finished runs with at least two numbers for"),
        (["--choose", "rounds"], "needs finished runs with at least two numbers for"),
        (["--choose", "algorithm.mu", "--metric", "val/accuracy"], "--metric must be personal/..., got val/accuracy"),
        (["--choose", "algorithm.mu", "--metric", "personal/acuracy"], "the nearest are personal/accuracy"),
        (
            ["--choose", "algorithm.mu", "--select", "best", "--figures", "x"],
            "--choose algorithm.mu cannot be combined with --select, --figures: leave out these flags",
        ),
    ],
)
def test_wrong_flags_get_one_sentence(sweep, capsys, flags, sentence):
    assert main([str(sweep), *flags]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_what_is_pasted_is_read_as_it_was_meant(capsys):
    cfg = compose(["algorithm=pgfed", override("algorithm.eta2", [1e-05, 1, 0.1, 1e-5])[1:-1]])
    check(cfg)
    assert list(cfg.algorithm.eta2) == [1e-05, 1, 0.1, 1e-5]


def played(folder: Path, override: str) -> dict[str, Any]:
    """A run of two rounds on digits, four clients."""
    given = (
        "algorithm=local dataset.val_fraction=0.2 partition.num_clients=4 rounds=2 clients_per_round=4 "
        "model.hidden=[8] tracking=disabled hardware.device=cpu hardware.executor=vmap checkpoint.every=0"
    )
    cfg = compose([*given.split(), override])
    check(cfg)
    folder.mkdir()
    save_config(cfg, folder / "config.yaml")
    return run(cfg, folder)


def test_from_a_sweep_to_the_run_of_each_its_own(tmp_path, capsys):
    """Real runs; nobody takes a rate of almost nothing."""
    for rate in (0.00001, 0.05, 0.4):
        played(tmp_path / str(rate), f"optimizer.lr={rate}")
    assert main([str(tmp_path), "--choose", "optimizer.lr"]) == 0
    pasted = capsys.readouterr().out.splitlines()[-1].strip("'")
    own = played(tmp_path / "own", pasted)
    assert own["status"] == "finished"
    rates = find_runs([tmp_path / "own"])[0].config["optimizer"]["lr"]
    assert set(rates) <= {0.05, 0.4} and len(rates) == 4
    capsys.readouterr()
    assert main([str(tmp_path), "--choose", "optimizer.lr"]) == 0  # that run is no value
    assert capsys.readouterr().out.splitlines()[-1].strip("'") == pasted
