"""``fedbench tune`` from end to end: planted values, equal budgets, halving to equal bytes, and what it refuses."""

import csv
from pathlib import Path

import pytest
from schemas import validated

from fedbench.commands import main
from fedbench.report.runs import find_runs
from fedbench.report.tuning import choice_table

SETTING = [
    *("dataset=digits", "model.hidden=[8]", "partition.num_clients=6", "clients_per_round=3", "rounds=4"),
    *("local.epochs=1", "local.batch_size=10", "dataset.val_fraction=0.2", "hardware.device=cpu"),
    *("hardware.executor=vmap", "tracking=disabled"),
]


def tune(folder: Path, *arguments: str) -> int:
    return main(["tune", *SETTING, f"sweep_dir={folder}", *arguments])


def ledger(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def total_rounds(rows: list[dict[str, str]], algorithm: str) -> int:
    return sum(int(row["rounds"]) for row in rows if row["algorithm"] == algorithm)


@pytest.mark.parametrize(
    "values, search",
    [
        ("optimizer.lr=0.00001,0.1,1000", "grid"),
        pytest.param("optimizer.lr=choice(0.00001,0.1,1000)", "tpe", marks=pytest.mark.slow),
    ],
)
def test_a_planted_learning_rate_is_chosen(
    values: str, search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are too small to learn, or diverge.  The chosen value is then run with other seeds."""
    trials = 3 if search == "grid" else 6
    arguments = (
        values,
        "algorithm=local",
        "partition=iid",
        "seed=0,1",
        f"--trials={trials}",
        f"--search={search}",
        "--test-seeds=7,9",
    )
    assert tune(tmp_path, *arguments, "--format=csv") == 0
    row = next(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert row["chosen"] == "optimizer.lr=0.1" and row["n_val"] == row["n_test"] == "2"
    tested = {run.seed for run in find_runs([tmp_path]) if run.flat_config["optimizer.lr"] == 0.1}
    assert tested == {0, 1, 7, 9}
    assert {run.seed for run in find_runs([tmp_path]) if run.flat_config["optimizer.lr"] != 0.1} <= {0, 1}


@pytest.mark.slow
def test_budgets_are_equal(tmp_path: Path) -> None:
    """A method with two options gets as many trials, seeds and rounds as one with one option."""
    assert tune(tmp_path, "algorithm=fedavg,ditto", "seed=0", "--trials=3", "--test-seeds=none", "--halving=2") == 0
    rows = ledger(tmp_path)
    assert [row["algorithm"] for row in rows] == ["fedavg"] * 3 + ["ditto"] * 3
    assert total_rounds(rows, "fedavg") == total_rounds(rows, "ditto") == 2 + 4 + 4
    assert {row["seeds"] for row in rows} == {"0"}


@pytest.mark.slow
def test_promoted_trials_have_the_bytes_of_uninterrupted_ones(tmp_path: Path) -> None:
    arguments = ("algorithm=fedper", "seed=0,1", "--trials=3", "--search=random", "--test-seeds=none")
    assert tune(tmp_path / "whole", *arguments) == 0
    assert tune(tmp_path / "halved", *arguments, "--halving=2") == 0
    rows = ledger(tmp_path / "halved")
    assert [row["state"] for row in rows].count("finished") == 2 and {row["rounds"] for row in rows} == {"2", "4"}
    compared = 0
    for run in find_runs([tmp_path / "halved"]):
        whole = tmp_path / "whole" / run.path.name
        for name in ("metrics.csv", "clients.csv"):
            ours, theirs = (run.path / name).read_bytes(), (whole / name).read_bytes()
            assert ours == theirs if run.finished else theirs.startswith(ours)
            compared += run.finished
    assert compared == 2 * 2 * 2  # trials, seeds, files
    assert tune(tmp_path / "whole", *arguments, "--halving=2") == 0
    assert ledger(tmp_path / "whole") == rows  # whole runs are compared by their scores at the rungs, too


def test_the_same_command_resumes_and_repeats_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("algorithm=fedper", "seed=0", "--trials=3", "--halving=2", "--test-seeds=5")
    assert tune(tmp_path, *arguments, "--json") == 0
    first, files = capsys.readouterr().out, {p: p.read_bytes() for p in tmp_path.rglob("c*s.csv")}
    assert tune(tmp_path, *arguments, "--json") == 0
    result = validated(first, "tune")
    assert [trial["trial"] for trial in result["trials"]] == [1, 2, 3]
    assert sorted(trial["rounds"] for trial in result["trials"]) == [2, 4, 4]
    assert result["tables"][0]["rows"][0]["n_test"] == 1
    assert capsys.readouterr().out == first
    assert files == {p: p.read_bytes() for p in tmp_path.rglob("c*s.csv")}  # costs.csv has measured seconds
    assert len(files) == 2 * (3 + 1)


@pytest.mark.slow
def test_several_data_sets_are_searched_separately(tmp_path: Path) -> None:
    arguments = ("algorithm=local,fedper", "partition=dirichlet,iid", "seed=0", "--trials=1", "--test-seeds=none")
    assert tune(tmp_path, *arguments) == 0
    assert [(row["algorithm"], row["partition"]) for row in ledger(tmp_path)] == [
        ("local", "dirichlet"), ("local", "iid"), ("fedper", "dirichlet"), ("fedper", "iid"),
    ]  # fmt: skip


@pytest.mark.slow
def test_of_equal_trials_the_report_names_the_one_that_was_tested(tmp_path: Path) -> None:
    """The first trial has larger values, and all have the same scores, because nothing is learned."""
    values = ("algorithm.mu=0.2,0.1", "optimizer.lr=1e-30", "algorithm=fedprox", "--search=grid", "--trials=2")
    assert tune(tmp_path, *values, "seed=0", "--test-seeds=4,5") == 0
    [row] = choice_table(find_runs([tmp_path]), "personal/accuracy", "last").rows
    assert row["chosen"] == "algorithm.mu=0.1" and row["n_test"] == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--trials=0",), "--trials is 0: give a number of at least 1"),
        (("--halving=1",), "--halving is 1: give a factor of at least 2"),
        (("seed=0,1", "--test-seeds=1,2"), "--test-seeds=1,2: seed 1 is also a seed of the trials; give other seeds"),
        (("seed=a",), "seed=a: give different integers from 0, separated by commas, as in seed=0,1,2"),
        (("dataset.val_fraction=0",), "dataset.val_fraction is given twice"),
        (("algorithm.mu=1,2", "algorithm=fedavg"), "no method of this command has the option algorithm.mu"),
        (("--search=grid", "algorithm=fedavg"), "optimizer.lr has an interval: list its values in the command"),
        (("--metric=val/accuracy",), "--metric is val/accuracy: give a metric that begins with personal/"),
        (("algorithm=nonsense",), "algorithm=nonsense is not an option"),
    ],
)
def test_mistakes_are_refused_before_any_run(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("config.yaml"))


def test_validation_samples_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [text for text in SETTING if "val_fraction" not in text]
    assert main(["tune", *options, f"sweep_dir={tmp_path}"]) == 2
    assert "dataset.val_fraction is 0, so there are none: set it, for example to 0.2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_whose_trials_all_fail_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FedPIA needs a model with adapters."""
    status = tune(tmp_path, "algorithm=fedavg,fedpia", "seed=0", "--trials=2", "--halving=2", "--test-seeds=3")
    out, err = capsys.readouterr()
    assert status == 1 and "all trials of fedpia on digits failed" in err and "FedAvg" in out
    states = [(row["algorithm"], row["state"]) for row in ledger(tmp_path)]
    assert sorted(states) == [("fedavg", "finished"), ("fedavg", "stopped"), ("fedpia", "failed"), ("fedpia", "failed")]
