"""A printed table beside our runs: the right cells, the right numbers, and the command for what is missing."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml
from run_folders import make_run, with_checkpoint

from fedbench.config.conf_tree import find_conf_dir
from fedbench.report import paper
from fedbench.report.command import main
from fedbench.report.paper import Cell
from fedbench.report.paper_metrics import METRICS, PrintedCell, clients_of, domain_of, is_measured
from fedbench.report.runs import Run
from fedbench.report.table import Spread

FACTS = {
    *("cancer_images", "normal_images", "n_classes", "n_clients", "sample_rate_pct", "test_size", "train_size"),
    *("fid_client1", "fid_client2", "fid_client3", "fid_client4", "gating_params_reported", "printed_rank"),
    *("accuracy_open", "accuracy_closed"),
}
# Printed by the paper for CIFAR10, 25 clients: Local 72.40 ± 0.45, FedAvg 65.07 ± 0.25, PGFed 81.02 ± 0.41.


def run_for(folder: Path, algorithm: str, seed: int, accuracy: float, overrides: str = "", **block) -> Path:
    """A run of an experiment: four clients whose mean accuracy is best at round 2, where it is ``accuracy``."""
    spread = np.array([-0.1, -0.05, 0.05, 0.1])
    clients = np.stack([accuracy - 0.2 + spread, accuracy + spread, accuracy - 0.01 + spread])
    about = {"table": "pgfed_table1_cifar", "dataset": "CIFAR10", "clients": 25} | block
    path = make_run(
        folder, algorithm, seed, clients=clients, config={"paper": about, "choices": {"experiment": f"t/{algorithm}"}}
    )
    (path / ".hydra").mkdir()
    given = [f"+experiment=t/{algorithm}", f"seed={seed}", "hardware=cpu", *overrides.split()]
    (path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(given))
    return path


def choose(path: Path, **options: str) -> None:
    """Change the options that a run says it was run with."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["choices"].update(options)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | options))


@pytest.fixture
def conf_dir(tmp_path, monkeypatch) -> Path:
    """A conf folder whose experiments run Local, FedAvg and PGFed for any number of clients on CIFAR10."""
    conf = tmp_path / "conf"
    for method in ("Local", "FedAvg", "PGFed"):
        path = conf / "experiment" / "t" / f"{method.lower()}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            yaml.safe_dump({"defaults": ["base", {"override /algorithm": "x"}], "paper": {"method": method}})
        )
    about = {"table": "pgfed_table1_cifar", "dataset": "CIFAR10", "clients": "${partition.num_clients}"}
    (conf / "experiment" / "t" / "base.yaml").write_text(yaml.safe_dump({"paper": about}))
    (conf / "experiment" / "debug.yaml").write_text("rounds: 2\n")
    monkeypatch.setattr("fedbench.config.conf_tree.find_conf_dir", lambda: conf)
    return conf


@pytest.fixture
def half(tmp_path) -> Path:
    """Local and PGFed at 25 clients over three seeds; one FedAvg run; one in a reduced setting."""
    folder = tmp_path / "runs"
    for seed in range(3):
        run_for(folder, "local", seed, 0.70 + 0.01 * seed, method="Local")
        run_for(folder, "pgfed", seed, 0.80 + 0.02 * seed, "partition.num_clients=25", method="PGFed")
    run_for(folder, "fedavg", 0, 0.75, method="FedAvg")
    run_for(folder, "pgfed", 0, 0.6, "rounds=2", method="PGFed")
    return folder


def cells_of(capsys, *args: str) -> dict[tuple[str, str, str, str], dict[str, str]]:
    assert main([*args, "--format", "csv"]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    return {(row["method"], row["dataset"], row["clients"], row["overrides"]): row for row in rows}


def test_every_cell_of_a_half_done_table(half, conf_dir, capsys):
    """PGFed: ours 80 82 84, so 82 ± 1.63; printed 81.02, so 0.98 off, 0.60 of our std."""
    cells = cells_of(capsys, str(half), "--paper", "pgfed_table1_cifar")
    assert len(cells) == 84 + 1  # the reduced setting is a row of its own
    row = cells["PGFed", "CIFAR10", "25", ""]
    std = 2 * np.sqrt(2 / 3)
    printed = float(row["printed_mean"])
    expected = {"ours_mean": 82, "ours_std": std, "ours_n": 3, "n": 3, "difference": 82 - printed}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
    assert float(row["in_std"]) == pytest.approx((82 - printed) / std)
    assert float(cells["PGFed", "CIFAR10", "25", "rounds=2"]["ours_mean"]) == pytest.approx(60)
    single = cells["FedAvg", "CIFAR10", "25", ""]
    assert (single["ours_n"], single["ours_std"], single["in_std"]) == ("1", "", "")
    missing = cells["PGFed", "CIFAR10", "50", ""]
    assert (missing["ours_mean"], missing["n"]) == ("", "0")


def test_text_says_what_is_missing_and_how_to_run_it(half, conf_dir, capsys):
    run_for(half, "fedavg", 1, 0.7, method="FedAvgg")
    assert main([str(half), "--paper", "pgfed_table1_cifar"]) == 0
    text = capsys.readouterr().out
    assert "81 of 84 cells are not run." in text
    for method in ("Local", "FedAvg", "PGFed"):
        assert f"  {method}: python -m fedbench +experiment=t/{method.lower()}\n" in text.replace("uv run ", "")
    assert "CIFAR10, 50 (partition.num_clients=50): Local 70.28 ± 0.38, FedAvg" in text
    assert "75 cells have no experiment file (methods: Local, FedAvg, FedDyn, pFedMe" in text
    assert "no row of the table has the values of its key paper" in text
    ranking = text[text.index("Kendall's tau-b") :].splitlines()
    assert ranking[2].split() == ["CIFAR10", "25", "0.33", "no", "3", "of", "14"]  # FedAvg is above Local here


def test_a_column_may_depend_on_the_overrides(conf_dir, tmp_path, capsys):
    """dataset=mine is no column of the paper: that run answers nothing."""
    columns = {"dataset=cifar10": "CIFAR10", "dataset=cifar100": "CIFAR100"}
    base = {"table": "pgfed_table1_cifar", "dataset": columns, "clients": "${partition.num_clients}"}
    (conf_dir / "experiment" / "t" / "base.yaml").write_text(yaml.safe_dump({"paper": base}))
    folder = tmp_path / "runs"
    for seed, dataset in enumerate(("cifar10", "cifar100", "mine")):
        path = run_for(folder, "pgfed", seed, 0.7, f"dataset={dataset}", method="PGFed", dataset=columns)
        choose(path, dataset=dataset)
    done = {key: row["n"] for key, row in cells_of(capsys, str(folder), "--paper", "pgfed_table1_cifar").items()
            if row["n"] != "0"}  # fmt: skip
    assert done == {("PGFed", "CIFAR10", "25", ""): "1", ("PGFed", "CIFAR100", "25", ""): "1"}
    assert main([str(folder), "--paper", "pgfed_table1_cifar"]) == 0
    text = capsys.readouterr().out
    assert "CIFAR100, 25 (partition.num_clients=25 dataset=cifar100): Local" in text
    assert "reproduces no cell" in text


def test_a_reduced_setting_is_told_apart_and_leaves_its_cell_to_be_run(conf_dir, tmp_path, capsys):
    folder = tmp_path / "runs"
    path = run_for(folder, "pgfed", 0, 0.7, "rounds=9 ++dataset.path=/my/data/c.npz", method="PGFed")
    choose(path, experiment="t/pgfed,reduced/tenth")
    cells = cells_of(capsys, str(folder), "--paper", "pgfed_table1_cifar")
    row = cells["PGFed", "CIFAR10", "25", "reduced/tenth dataset.path=c.npz rounds=9"]
    assert float(row["ours_mean"]) == pytest.approx(70)
    assert main([str(folder), "--paper", "pgfed_table1_cifar"]) == 0
    text = capsys.readouterr().out
    assert "84 of 84 cells are not run (1 of them only in a reduced setting)." in text


def test_unfinished_runs_of_the_table_are_listed(half, conf_dir, capsys):
    about = {"table": ["pgfed_gain", "pgfed_table1_cifar"], "method": "PGFed"}
    with_checkpoint(make_run(half, "pgfed", 9, status="running", config={"paper": about}))
    with_checkpoint(make_run(half, "pgfed", 9, status="running"))
    assert main([str(half), "--paper", "pgfed_gain"]) == 0
    assert capsys.readouterr().out.count("resume=") == 1


def test_without_any_run_everything_is_to_be_run(tmp_path, conf_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--paper", "pgfed_table1_cifar", "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "84 of 84 cells are not run." in text
    assert "CIFAR10, 25 (partition.num_clients=25): Local 72.40 ± 0.45, FedAvg" in text and "\n|" not in text


def test_a_table_of_facts_is_not_said_to_be_run(conf_dir, capsys):
    assert main([str(conf_dir.parent), "--paper", "pfedmoap_table5_datasets"]) == 2  # without any run
    capsys.readouterr()
    make_run(conf_dir.parent / "some", "pgfed")
    assert main([str(conf_dir.parent / "some"), "--paper", "pfedmoap_table5_datasets"]) == 0
    assert capsys.readouterr().out.strip() == "pfedmoap_table5_datasets: nothing in it is measured by a run"


def test_a_file_of_a_figures_numbers_is_no_table(capsys):
    assert main(["--paper", "pfednet_compression"]) == 2
    error = capsys.readouterr().err
    assert "fedbench/papers/pfednet_compression.csv has numbers of a figure" in error and "no such table" not in error


CONVERGENCE = ("APFL", "FedPer", "Per-FedAvg", "FedRoD", "PGFed", "PGFedMo")  # the methods of pgfed_convergence


def test_seeds_that_never_reach_the_target_are_not_counted(tmp_path):
    """Neither in rounds nor in the ratio that is made of them."""
    for method in CONVERGENCE:
        for seed, accuracy in enumerate((0.75, 0.6)):  # of each one seed reaches 0.7
            run_for(tmp_path, f"{method}{seed}", seed, accuracy, table="pgfed_convergence", method=method)
    cells = measured(tmp_path, "pgfed_convergence")
    counted = {
        metric: (cell.ours.count, cell.ours.total) for (method, metric), cell in cells.items() if method == "PGFed"
    }
    assert counted == {"rounds_to_target": (1, 2), "speedup_x_vs_slowest": (1, 2)}


def test_a_cell_says_over_how_many_clients_it_is(tmp_path, capsys):
    """AUC is not defined for two of the four clients."""
    path = run_for(
        tmp_path, "pgfed", 0, 0.75, table="breast_cancer_real", dataset="mammograms", clients=4, method="PGFed"
    )
    header, *lines = (path / "metrics.csv").read_text().splitlines()
    lines = [f"{header},personal/auc,personal/auc_clients", *(f"{line},0.9,2" for line in lines)]
    (path / "metrics.csv").write_text("\n".join(lines) + "\n")
    cells = measured(tmp_path, "breast_cancer_real")
    assert cells["PGFed", "mean_auc_pct"].clients == "2 of 4"
    assert cells["PGFed", "mean_accuracy_pct"].clients is None
    assert main([str(tmp_path), "--paper", "breast_cancer_real"]) == 0
    text = capsys.readouterr().out
    assert "  2 of 4" in text and "over clients: the number of clients in our mean" in text


def test_dot_plot(half, conf_dir, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([str(half), "--paper", "pgfed_table1_cifar", "--figures", str(tmp_path / "f")]) == 0
    assert (tmp_path / "f" / "paper_pgfed_table1_cifar.png").stat().st_size > 10_000


def measured(folder: Path, table: str, target: float = 0.7) -> dict[tuple[str, str], paper.Cell]:
    runs = [Run(path) for path in sorted(folder.iterdir())]
    cells = paper.compare(table, runs, [], target)
    return {(cell.row["method"], cell.row["metric"]): cell for cell in cells if cell.runs}


def test_gains_show_the_spread_over_clients_and_judge_by_that_over_seeds(tmp_path):
    for seed, accuracy in enumerate((0.75, 0.77, 0.76)):
        block = {"table": "pgfed_gain", "method": "PGFed"}
        run_for(tmp_path, "local", seed, 0.7, table="none")
        path = run_for(tmp_path, "pgfed", seed, accuracy, **block)
        lines = (path / "clients.csv").read_text().replace(f"2,0,9,{accuracy - 0.1!r}", f"2,0,9,{accuracy + 0.1!r}")
        (path / "clients.csv").write_text(lines)  # client 0 is .2 better at round 2
    (cell,) = measured(tmp_path, "pgfed_gain").values()
    assert cell.ours.mean == pytest.approx(6 + 20 / 4)
    assert cell.ours.std == pytest.approx(np.std([20, 0, 0, 0]))
    assert cell.std_over_seeds == pytest.approx(np.std([1, -1, 0]))
    assert cell.difference_in_std == pytest.approx(cell.difference / np.std([1, -1, 0]))
    cell.ours = replace(cell.ours, count=2)
    assert np.isnan(cell.difference_in_std)  # the std of two seeds says nothing


def test_speeds_are_relative_to_fedavg(tmp_path):
    for name, per_s in (("APFL", 500.0), ("FedAvg", 1000.0)):
        path = run_for(tmp_path, name.lower(), 0, 0.75, table="pgfed_speed", method=name, clients=50)
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"cost": {"images_per_s": per_s}}))
    cells = measured(tmp_path, "pgfed_speed")
    assert cells["APFL", "relative_speed_pct"].ours.mean == pytest.approx(50)
    assert cells["APFL", "images_per_s"].ours.mean == 500
    shutil.rmtree(path)
    cells = measured(tmp_path, "pgfed_speed")  # without FedAvg
    assert cells["APFL", "images_per_s"].ours.mean == 500
    assert cells["APFL", "relative_speed_pct"].ours.count == 0


def test_a_speed_up_over_the_slowest_method_needs_all_printed_methods(tmp_path):
    for name in CONVERGENCE:
        if name != "Per-FedAvg":
            run_for(tmp_path, name, 0, 0.75, table="pgfed_convergence", method=name, clients=50)
    cells = measured(tmp_path, "pgfed_convergence")
    assert cells["APFL", "rounds_to_target"].ours.mean == 2
    assert cells["APFL", "speedup_x_vs_slowest"].ours.count == 0
    slow = run_for(tmp_path, "perfedavg", 0, 0.71, table="pgfed_convergence", method="Per-FedAvg", clients=50)
    text = (slow / "metrics.csv").read_text().splitlines()
    text[2:3] = [text[2].replace("0.71", "0.65", 1)]  # reaches .70 at round 3 only
    (slow / "metrics.csv").write_text("\n".join(text) + "\n")
    cells = measured(tmp_path, "pgfed_convergence")
    assert cells["APFL", "speedup_x_vs_slowest"].ours.mean == pytest.approx(1.5)
    assert cells["Per-FedAvg", "speedup_x_vs_slowest"].ours.mean == pytest.approx(1)


def test_domain_columns_are_means_over_the_domain_at_the_best_mean_round(tmp_path):
    block = {"table": "pgfed_officehome", "method": "PGFed", "dataset": "Office-Home", "clients": ["5", 20]}
    path = run_for(tmp_path, "pgfed", 0, 0.5, **block)
    (path / "partition.json").write_text(json.dumps({"domains": ["Art", "Art", "Clipart", "Real_World"]}))
    runs = [Run(path)]
    found = {c.row["setting"].rpartition("=")[2]: c for c in paper.compare("pgfed_officehome", runs, []) if c.runs}
    expected = {"Art": 42.5, "Clipart": 55, "Real World": 60, "all (mean)": 50}
    assert {name: cell.ours.mean for name, cell in found.items() if cell.ours.count} == pytest.approx(expected)
    assert not found["Product"].ours.count
    table = paper.cell_table("pgfed_officehome", list(found.values()))
    assert [row["ours"] for row in table.rows if row["setting"].endswith("Product")] == ["not measured"]


def test_client_columns_of_the_case_study(tmp_path):
    run_for(tmp_path, "local", 0, 0.7, table="none")
    path = run_for(tmp_path, "pgfed", 0, 0.8)
    for each in tmp_path.iterdir():
        for name in ("clients.csv", "metrics.csv"):
            text = (each / name).read_text().replace("personal/accuracy", "personal/auc", 1)
            (each / name).write_text(text)
    runs = tuple(Run(each) for each in tmp_path.iterdir())
    run = next(r for r in runs if r.path == path)
    row = {"dataset": "mammograms", "setting": "setting 1", "metric": "x"}
    ask = {
        name: METRICS[name](run, PrintedCell("breast_cancer_real", row, runs)).value
        for name in METRICS
        if "auc" in name
    }
    assert ask["client1_auc_pct"] == pytest.approx(70)
    assert ask["client4_auc_gain"] == pytest.approx(10)
    assert ask["mean_auc_pct"] == pytest.approx(80)
    assert ask["mean_auc_gain (std over clients)"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("algorithm", "table", "extra", "expected"),
    [
        ("pgfed", "pgfed_table1_cifar", {}, 80),
        ("fedbabu", "pgfed_table1_cifar", {}, 79),
        ("pgfed", "pfedmoap_table2_cifar", {}, 79),
        ("pgfed", "pfedmoap_table2_cifar", {"select": "best"}, 80),
    ],
)
def test_round_whose_value_is_printed(tmp_path, algorithm, table, extra, expected):
    run = Run(run_for(tmp_path, algorithm, 0, 0.8, **extra))
    row = {"dataset": "CIFAR10", "setting": "", "metric": "mean_client_test_accuracy_pct"}
    assert METRICS[row["metric"]](run, PrintedCell(table, row)).value == pytest.approx(expected)


def test_the_last_three_rounds_as_the_released_analysis_prints_them(tmp_path):
    """Mean and sample deviation over rounds of one run, beside the plain last round."""
    run = Run(run_for(tmp_path, "pfednet", 0, 0.8, select="last3"))
    row = {"dataset": "CHD", "setting": "delta=1", "metric": "test_accuracy_percent"}
    for values, expected in (([0.1, 0.2, 0.5, 0.6, 0.7], (60, 10)), ([0.5], (50, None))):
        rounds = range(1, len(values) + 1)
        run.metrics = pandas.DataFrame({"personal/accuracy_weighted": values}, index=rounds)
        answer = METRICS[row["metric"]](run, PrintedCell("pfednet_table5_chd", row))
        assert (answer.value, answer.std) == (pytest.approx(expected[0]), expected[1] and pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("row", "domain"),
    [
        ({"dataset": "Office-Home", "setting": "5 clients; domain=Real World"}, "Real World"),
        ({"dataset": "Office-Home", "setting": "5 clients; domain=all (mean)"}, None),
        ({"dataset": "DomainNet/Clipart", "setting": ""}, "Clipart"),
        ({"dataset": "DomainNet/Average", "setting": ""}, None),
        ({"dataset": "CIFAR10", "setting": "Dir(0.3)"}, None),
        ({"dataset": "c1_ct", "setting": "", "metric": "accuracy"}, "c1_ct"),
        ({"dataset": "slake", "setting": "", "metric": "accuracy_open"}, "slake"),
        ({"dataset": "open_i_overall", "setting": "", "metric": "f1"}, None),
    ],
)
def test_domain_of_a_cell(row, domain):
    assert domain_of({"metric": "mean_client_test_accuracy_pct"} | row) == domain


def test_clients_of_a_domain_may_be_numbered(tmp_path):
    assert clients_of(Run(tmp_path), "Art") == []
    (tmp_path / "partition.json").write_text('{"domains": ["ct", "ultrasound", "x_ray"]}')
    asked = ("c1_ct", "c2_us", "c3_xray", "x-ray", "c4_oct")
    assert [clients_of(Run(tmp_path), name) for name in asked] == [[0], [1], [2], [2], []]


def test_patterns_and_lists_in_the_paper_block():
    row = {"setting": "setting 1: RSNA by machine id; real data only", "clients": "4", "method": "PGFed"}
    assert paper.matches({"table": "t", "setting": "setting 1*", "clients": 4, "method": ["FedAvg", "PGFed"]}, "t", row)
    assert not paper.matches({"table": "t", "method": "PGFed", "setting": "setting 2*"}, "t", row)
    assert not paper.matches({"table": "t", "method": "PGFed", "colour": "red"}, "t", row)
    assert not paper.matches({"table": "t", "clients": 4}, "t", row)
    assert not paper.matches({"table": "u", "method": "PGFed"}, "t", row)


@pytest.mark.parametrize("name", paper.tables())
def test_packaged_tables_are_numbers_we_know(name):
    rows = paper.read_table(name)
    assert rows
    for row in rows:
        float(row["mean"])
        assert is_measured(row["metric"]) or row["metric"] in FACTS
        assert not row["std"] or float(row["std"]) >= 0


def test_every_experiment_answers_a_printed_cell():
    rows = [e for e in paper.experiments([find_conf_dir()]) if "method" in e.paper]  # the rest are bases of these
    for experiment in rows:
        named = experiment.paper["table"]
        for table in named if isinstance(named, list) else [named]:
            answered = [row for row in paper.read_table(table) if paper.matches(experiment.paper, table, row)]
            assert answered, f"{experiment.name} reproduces no cell of {table}"


def test_a_spread_of_rounding_is_none(tmp_path):
    """Seeds that differ in their last bits have no deviations to count in."""
    cell = Cell({"mean": "50", "std": "1"}, ours=Spread(90.0, 1e-14, 3, 3), std_over_seeds=1e-14)
    assert (
        np.isnan(cell.difference_in_std) and Cell(cell.row, ours=cell.ours, std_over_seeds=2.0).difference_in_std == 20
    )
