"""The tables of single clients against a plain recomputation from clients.csv."""

import csv
import json
import math
from pathlib import Path
from statistics import mean, pstdev

import numpy as np
import pytest
from run_folders import BASE, make_run
from schemas import validated

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.report.clients import client, clients
from fedbench.report.runs import Run, find_runs
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs

COUNTS = [[4, 0, 0], [2, 2, 0], [1, 1, 2], [5, 5, 5]]  # samples of four clients by label


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds of Local and of two methods, with random scores of four clients in three rounds."""
    rng = np.random.default_rng(0)
    for algorithm in ("local", "fedavg", "ditto"):
        for seed in (0, 1):
            scores = rng.uniform(0.2, 1, (3, 4))
            best = {"round": 2, "values": {}}
            path = make_run(tmp_path, algorithm, seed, clients=scores, val=scores, summary={"best_val": best})
            partition = {"train": [sum(row) for row in COUNTS], "label_counts": COUNTS}
            (path / "partition.json").write_text(json.dumps(partition))
    return tmp_path


def recomputed(folder: Path, algorithm: str, round: int, column: str = "personal/accuracy") -> dict[int, list[float]]:
    """The scores of each client, a list over seeds, read from clients.csv line by line."""
    found: dict[int, list[float]] = {}
    for path in sorted(folder.glob(f"{algorithm}-*/clients.csv")):
        for row in csv.DictReader(path.open()):
            if int(row["round"]) == round:
                found.setdefault(int(row["client"]), []).append(float(row[column]))
    return found


def tables_of(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[dict]]:
    assert main(["report", str(folder), *words, "--json"]) == 0
    return {table["name"]: table["rows"] for table in validated(capsys.readouterr().out, "report")["tables"]}


@pytest.mark.parametrize(("select", "round"), [("last", 3), ("best_val", 2)])
@pytest.mark.parametrize("metric", ["personal/accuracy", "personal/loss"])
def test_clients_and_their_summary(
    select: str, round: int, metric: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tables_of(folder, capsys, "--clients", "--select", select, "--metric", metric)
    local = recomputed(folder, "local", round, metric)
    better = -1 if metric == "personal/loss" else 1
    for algorithm in ("local", "fedavg", "ditto"):
        values = recomputed(folder, algorithm, round, metric)
        gains = {i: mean(better * (a - b) for a, b in zip(values[i], local[i])) for i in values}
        rows = [row for row in tables["clients"] if row["method"] == algorithm]
        by_gain = sorted(values, key=lambda i: -gains[i] if algorithm != "local" else -better * mean(values[i]))
        assert [int(row["client"]) for row in rows] == by_gain
        for row, i in zip(rows, by_gain):
            shares = [count / sum(COUNTS[i]) for count in COUNTS[i] if count]
            assert row["samples"] == sum(COUNTS[i])
            assert row["entropy"] == pytest.approx(-sum(share * math.log2(share) for share in shares), abs=1e-12)
            assert row["score"] == pytest.approx(mean(values[i]))
            assert row["gain"] == (None if algorithm == "local" else pytest.approx(gains[i]))
        (head,) = (row for row in tables["client_summary"] if row["method"] == algorithm)
        means = sorted((mean(of_client) for of_client in values.values()), key=lambda value: better * value)
        assert (head["clients"], head["n"]) == (4, 2)
        expected = {"worst": means[0], "best": means[-1], "mean": mean(means), "std": pstdev(means)}
        expected["worst_tenth"] = means[0]  # of four clients: one
        assert {key: head[key] for key in expected} == pytest.approx(expected)
        below = sum(gain < 0 for gain in gains.values())
        assert head["below_local"] == (None if algorithm == "local" else below)


def test_the_worst_tenth_of_many_clients(tmp_path: Path) -> None:
    """Of 25 clients these are two."""
    path = make_run(tmp_path)
    rows = [f"3,{i},9,{0.01 * i}" for i in range(25)]
    (path / "clients.csv").write_text("\n".join(["round,client,n_test,personal/accuracy", *rows, ""]))
    runs = [Run(path)]
    (summary, table), _ = clients(group_runs(runs)[0], runs, Options(), "text", None)
    (row,) = summary.rows
    assert row["worst_tenth"] == pytest.approx((0.0 + 0.01) / 2) and row["below_local"] is None
    assert [r["client"] for r in table.rows] == [str(i) for i in reversed(range(25))]
    assert all(r["samples"] is None and r["entropy"] is None for r in table.rows)  # there is no partition.json


def test_seeds_of_another_partition_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = folder / "ditto-1-5" / "summary.json"
    values = json.loads(summary.read_text())
    summary.write_text(json.dumps(values | {"partition_hash": "p1"}))
    assert main(["report", str(folder), "--clients"]) == 0
    text = capsys.readouterr().out
    assert "Ditto: 1 seeds are left out" in text
    tables = tables_of(folder, capsys, "--clients")
    first = {row["client"]: row["score"] for row in tables["clients"] if row["method"] == "ditto"}
    assert first == {str(i): pytest.approx(values[0]) for i, values in recomputed(folder, "ditto", 3).items()}


def test_text_has_a_table_for_each_method_and_csv_one_for_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--clients"]) == 0
    text = capsys.readouterr().out
    for name in ("Local", "FedAvg", "Ditto"):
        assert f"\n{name}: personal/accuracy (%)\nclient  samples  label entropy (bits)  score" in text
    assert main(["report", str(folder), "--clients", "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 12 and {row["method"] for row in rows} == {"local", "fedavg", "ditto"}


def test_the_curve_of_a_client(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tables_of(folder, capsys, "--client", "2")["client"]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        for algorithm, name in (("local", "Local"), ("fedavg", "FedAvg"), ("ditto", "Ditto")):
            values = recomputed(folder, algorithm, row["round"])[2]
            assert row[name] == {"mean": pytest.approx(mean(values)), "std": pytest.approx(pstdev(values)), "n": 2,
                                 "total": 2}  # fmt: skip


def test_a_client_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.glob("*/partition.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"names": ["north", "east", "south", "west"]}))
    by_name, by_number = (tables_of(folder, capsys, "--client", name) for name in ("south", "2"))
    assert by_name == by_number
    assert {row["client"] for row in tables_of(folder, capsys, "--clients")["clients"]} == {
        *("north", "east", "south", "west")
    }
    assert main(["report", str(folder), "--client", "noth"]) == 2
    assert "--client noth is not a client of these runs: did you mean north" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--client", "4"], "--client 4 is not a client of these runs: the clients are numbered from 0 to 3"),
        (["--client", "-1"], "--client -1 is not a client of these runs: the clients are numbered from 0 to 3"),
        (["--client", ""], "--client is empty: give it a value, as in --client 3, or leave it out"),
        (["--client", "1", "--metric", "global/accuracy"], "no run has global/accuracy of this client"),
        (["--client", "1", "--clients"], "--client 1 cannot be combined with --clients: leave out these flags"),
        (["--clients", "--target", "0.5"], "--clients cannot be combined with --target: leave out these flags"),
        (["--clients", "--metric", "global/accuracy"], "choose another --metric, a column of clients.csv"),
    ],
)
def test_mistakes(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_figures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A panel for each method with gains, and a line for each method of one client."""
    for words, name, texts in (
        (["--clients"], "a_clients_digits_dirichlet_mlp_personal_accuracy.svg", ["FedAvg", "Ditto", "Gain over Local"]),
        (["--client", "2"], "a_client_2_personal_accuracy.svg", ["Local (n=2)", "FedAvg (n=2)", "Ditto (n=2)"]),
    ):
        assert main(["report", str(folder), *words, "--figures", str(tmp_path / "f" / "a.svg")]) == 0
        drawn = (tmp_path / "f" / name).read_text()
        assert all(text in drawn for text in texts) and name in capsys.readouterr().err


def test_a_method_without_local_has_no_gain(tmp_path: Path) -> None:
    make_run(tmp_path, "fedavg")
    runs = find_runs([tmp_path])
    groups, _ = group_runs(runs)
    tables, figures = clients(groups, runs, Options(), "csv", None)
    assert [row["gain"] for row in tables[0].rows] == [None] * 4 and figures == []
    assert [row["score"] for row in tables[0].rows] == pytest.approx(sorted(BASE + 0.05, reverse=True))
    with pytest.raises(ConfigError, match="no finished run has personal/accuracy of single clients"):
        clients([], runs, Options(), "text", None)
    with pytest.raises(ConfigError, match="is not a client of these runs"):
        client(groups, "9", Options(), None)


def test_comparisons_are_tables_of_the_same_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--compare --json` has the columns of the CSV, and the ranks if there are several settings."""
    for algorithm in ("fedavg", "ditto"):
        for seed in (0, 1):
            make_run(
                folder, algorithm, seed, config={"choices": {"dataset": "mnist"}}, clients=np.eye(3, 4) / (seed + 2)
            )
    tables = tables_of(folder, capsys, "--compare", "ditto", "fedavg")
    assert main(["report", str(folder), "--compare", "ditto", "fedavg", "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["difference"]["mean"] for row in tables["differences"]] == [float(r["difference_mean"]) for r in rows]
    assert {row["method"] for row in tables["ranks"]} == {"ditto", "fedavg"}
