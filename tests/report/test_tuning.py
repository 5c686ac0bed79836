"""report --choose: the values of each method are chosen by validation alone, and the table says what was compared."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from run_folders import make_run

from fedbench.core.options import ConfigError
from fedbench.report.command import main
from fedbench.report.runs import find_runs
from fedbench.report.tuning import choice_table, validation_score

METRIC = "personal/accuracy"


def make(
    folder: Path,
    algorithm: str,
    options: dict[str, float],
    val: tuple[float, ...],
    test: tuple[float, ...] = (0.5, 0.5, 0.5),
    seed: int = 0,
    status: str = "finished",
    config: dict | None = None,
    summary: dict | None = None,
) -> Path:
    """Write a run of four clients with mean validation and test accuracies of its three rounds."""
    values: dict = {"algorithm": {}, "optimizer": {"lr": 0.1}} | (config or {})
    for key, value in options.items():
        group, _, name = key.partition(".")
        values[group][name] = value
    best = {"round": int(np.argmax(val)) + 1, "values": {}}
    curves = (np.repeat(np.array(each)[:, None], 4, axis=1) for each in (test, val))
    return make_run(folder, algorithm, seed, (), status, values, {"best_val": best} | (summary or {}), *curves)


def rows(folder: Path, select: str = "last") -> dict[str, dict]:
    return {row["method"]: row for row in choice_table(find_runs([folder]), METRIC, select).rows}


def notes(folder: Path) -> str:
    return "\n".join(choice_table(find_runs([folder]), METRIC, "last").notes)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Ditto with two keys, FedAvg with one; the best test scores are elsewhere than the best validation scores."""
    for seed, shift in ((0, 0.0), (1, 0.1)):
        for lam, lr, val in ((0.1, 0.01, 0.5), (1.0, 0.01, 0.6), (10.0, 0.01, 0.4), (0.1, 0.1, 0.3)):
            test = (0.1, 0.1, 1.0 - val + shift)
            make(tmp_path, "ditto", {"algorithm.lam": lam, "optimizer.lr": lr}, (0.9, 0.1, val + shift), test, seed)
        for lr, val in ((0.01, 0.2), (0.1, 0.3)):
            make(tmp_path, "fedavg", {"optimizer.lr": lr}, (0.1, 0.1, val), seed=seed)
    return tmp_path


def test_each_method_takes_its_best_values(sweep: Path) -> None:
    found = rows(sweep)
    ditto, fedavg = found["ditto"], found["fedavg"]
    assert ditto["chosen"] == "algorithm.lam=1.0 optimizer.lr=0.01" and ditto["trials"] == 4
    assert (ditto["val"].mean, ditto["val"].std, ditto["last"].mean) == pytest.approx((0.65, 0.05, 0.45))
    assert ditto["best_val"].mean == pytest.approx(0.1)  # the validation score is best in round 1
    assert fedavg["chosen"] == "optimizer.lr=0.1" and fedavg["n_val"] == 2


def test_the_best_round_of_each_run_may_decide(sweep: Path) -> None:
    make(sweep, "fedavg", {"optimizer.lr": 0.5}, (0.8, 0.1, 0.1), seed=0)
    make(sweep, "fedavg", {"optimizer.lr": 0.5}, (0.1, 0.8, 0.1), seed=1)
    assert rows(sweep)["fedavg"]["chosen"] == "optimizer.lr=0.1"
    chosen = rows(sweep, "best_val")["fedavg"]
    assert chosen["chosen"] == "optimizer.lr=0.5" and chosen["val"].mean == pytest.approx(0.8)


def test_poisoned_test_scores_do_not_change_the_choice(sweep: Path) -> None:
    """Every score of test samples is replaced by noise."""
    before = {method: (row["chosen"], row["val"]) for method, row in rows(sweep).items()}
    rng = np.random.default_rng(0)
    for path in sweep.rglob("metrics.csv"):
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        for line in lines:
            line |= {name: str(rng.random() * 100) for name in line if name.startswith(("personal/", "global/"))}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, lines[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    after = rows(sweep)
    assert {method: (row["chosen"], row["val"]) for method, row in after.items()} == before
    assert after["ditto"]["last"].mean > 1.5  # but they are the ones that are printed


def test_a_choice_needs_no_test_scores(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made before any test score is read."""
    from fedbench.report import tuning

    def refuse(*arguments: object) -> float:
        raise AssertionError("a test score was read")

    monkeypatch.setattr("fedbench.report.scores.value_at", refuse)
    monkeypatch.setattr("fedbench.report.scores.selected_round", refuse)
    choices = [tuning.choose(study, METRIC, "last") for study in tuning.studies(find_runs([sweep]))]
    assert [choice.trial.options for choice in choices if choice] == [
        {"algorithm.lam": 1.0, "optimizer.lr": 0.01},
        {"optimizer.lr": 0.1},
    ]


def test_warnings(sweep: Path) -> None:
    text = notes(sweep)
    edges = "better ones may lie beyond them: ditto optimizer.lr=0.01 (smallest); fedavg optimizer.lr=0.1 (largest)"
    assert edges in text and "algorithm.lam" not in text
    assert "warning: methods had different numbers of trials, which favours those with more: ditto 4, fedavg 2" in text
    assert "Test scores are of the seeds by which the values were chosen: ditto, fedavg." in text


def test_seeds_that_only_the_chosen_trial_has_are_its_test_seeds(sweep: Path) -> None:
    for seed in (5, 6, 7):
        make(sweep, "fedavg", {"optimizer.lr": 0.1}, (0.0, 0.0, 0.0), (0.0, 0.0, 0.7), seed)
    row = rows(sweep)["fedavg"]
    assert (row["n_val"], row["n_test"]) == (2, 3)
    assert row["val"].mean == pytest.approx(0.3) and row["last"].mean == pytest.approx(0.7)
    assert "Test scores are of seeds that had no part in the choice: fedavg." in notes(sweep)


def test_unfinished_trials_count_but_are_not_chosen(sweep: Path) -> None:
    make(sweep, "fedavg", {"optimizer.lr": 1.0}, (0.9, 0.9, 0.9), seed=0)
    make(sweep, "fedavg", {"optimizer.lr": 1.0}, (0.9, 0.9, 0.9), seed=1, status="paused")
    for seed in (0, 1):
        make(sweep, "fedavg", {"optimizer.lr": 2.0}, (0.9, 0.9, 0.9), seed=seed, status="failed")
    row = rows(sweep)["fedavg"]
    assert (row["chosen"], row["trials"], row["n_val"]) == ("optimizer.lr=0.1", 4, 2)
    assert "Trials that did not finish all rounds: fedavg 2 of 4." in notes(sweep)


def test_an_undefined_score_is_the_worst(tmp_path: Path) -> None:
    make(tmp_path, "fedavg", {"optimizer.lr": 0.1}, (0.1, 0.1, 0.1))
    make(tmp_path, "fedavg", {"optimizer.lr": 0.2}, (0.1, 0.1, float("nan")))
    assert rows(tmp_path)["fedavg"]["chosen"] == "optimizer.lr=0.1"
    assert "warning: trials whose validation score is not a number: fedavg 1" in notes(tmp_path)


def test_settings_are_compared_separately(tmp_path: Path) -> None:
    for alpha, lr, val in ((0.1, 0.1, 0.6), (0.1, 0.2, 0.5), (1.0, 0.1, 0.5), (1.0, 0.2, 0.6)):
        make(tmp_path, "fedavg", {"optimizer.lr": lr}, (0, 0, val), config={"partition": {"alpha": alpha}})
    table = choice_table(find_runs([tmp_path]), METRIC, "last")
    assert [(row["partition.alpha"], row["chosen"]) for row in table.rows] == [
        (0.1, "optimizer.lr=0.1"), (1.0, "optimizer.lr=0.2"),
    ]  # fmt: skip


def test_other_data_are_another_setting(tmp_path: Path) -> None:
    for data_hash, lr, val in (("a", 0.1, 0.6), ("a", 0.2, 0.5), ("b", 0.1, 0.5), ("b", 0.2, 0.6)):
        make(tmp_path, "fedavg", {"optimizer.lr": lr}, (0, 0, val), summary={"data_hash": data_hash})
    chosen = [row["chosen"] for row in choice_table(find_runs([tmp_path]), METRIC, "last").rows]
    assert sorted(chosen) == ["optimizer.lr=0.1", "optimizer.lr=0.2"]


def test_a_run_that_failed_before_the_data_were_read_is_a_trial(tmp_path: Path) -> None:
    make(tmp_path, "fedavg", {"optimizer.lr": 0.1}, (0, 0, 0.5), summary={"data_hash": "a"})
    failed = make(tmp_path, "fedavg", {"optimizer.lr": 0.2}, (0, 0, 0.9))
    (failed / "summary.json").unlink()
    (failed / "error.txt").write_text("no")
    row = rows(tmp_path)["fedavg"]
    assert (row["chosen"], row["trials"]) == ("optimizer.lr=0.1", 2)


def test_trials_without_a_common_seed_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "fedavg", {"optimizer.lr": 0.1}, (0.1, 0.1, 0.1), seed=0)
    make(tmp_path, "fedavg", {"optimizer.lr": 0.2}, (0.1, 0.1, 0.1), seed=1)
    with pytest.raises(ConfigError, match="the trials of fedavg have no seed in common"):
        rows(tmp_path)


def test_scores_up_to_a_round(tmp_path: Path) -> None:
    path = make(tmp_path, "fedavg", {}, (0.2, 0.4, 0.1))
    [run] = find_runs([path])
    assert [validation_score(run, METRIC, "last", until) for until in (1, 2, None)] == pytest.approx([0.2, 0.4, 0.1])
    assert validation_score(run, METRIC, "best_val") == pytest.approx(0.4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--select", "best"],
            "--select best chooses a round by its test score, and --choose must not read test scores",
        ),
        (["--metric", "global/accuracy"], "--metric is global/accuracy, and must begin with personal/"),
        (["--target", "0.5"], "--choose cannot be combined with --target: leave out these flags"),
    ],
)
def test_mistakes(sweep: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--choose", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_behind_choose_is_refused(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--choose", str(sweep)]) == 2
    assert "this is a folder, and --choose may be followed by a config key" in capsys.readouterr().err


def test_runs_without_validation_scores_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "fedavg", 0)
    assert main([str(tmp_path), "--choose"]) == 2
    assert "has no validation score val/accuracy; set dataset.val_fraction" in capsys.readouterr().err
