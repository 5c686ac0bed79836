"""Run folders become a page's data, and what people wrote of a page stays."""

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from run_folders import make_run

from fedbench.pages import build
from fedbench.pages.command import main
from fedbench.pages.page import Page, read_page, write_page
from fedbench.report.command import main as report

pytest.importorskip("jinja2", reason="pages need jinja2: pip install jinja2")
TABLE = "pgfed_table1_cifar"


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Local, FedAvg and PGFed with two seeds; a run that failed."""
    folder = tmp_path / "sweep"
    for seed in (0, 1):
        make_run(folder, "local", seed, (0.0, 0.02, 0.01))
        make_run(folder, "fedavg", seed, (-0.1, -0.05, 0.02 + 0.01 * seed))
        make_run(folder, "pgfed", seed, (0.0, 0.1 + 0.02 * seed, 0.08))
    make_run(folder, "apple", 0, status="failed")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pipes(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def first_table(text: str) -> dict[str, list[str]]:
    """The columns of the first pipe table, by heading."""
    lines = pipes(text.partition("| method |")[1] + text.partition("| method |")[2].split("\n\n")[0])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {head: list(column) for head, _, *column in zip(*cells)}


def test_runs_of_which_none_is_finished_are_refused(tmp_path, capsys) -> None:
    make_run(tmp_path / "sweep", "apple", 0, status="failed")
    assert main(["write", str(tmp_path / "page"), str(tmp_path / "sweep")]) == 2
    assert "is finished, so part main has no results: resume the runs" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_a_page_shows_the_tables_of_the_report(sweep, tmp_path, capsys) -> None:
    page = tmp_path / "results" / "mine"
    assert main(["write", str(page), str(sweep), "--title", "Mine"]) == 0
    capsys.readouterr()
    report([str(sweep), "--format", "markdown"])
    reported = first_table(capsys.readouterr().out)
    shown = first_table((page / "README.md").read_text())
    both = [name for name in shown if name in reported]
    assert both[:5] == ["method", "last", "best", "worst tenth", "global"]
    assert {name: shown[name] for name in both} == {name: reported[name] for name in both}
    assert shown["method"] == ["PGFed", "FedAvg", "Local"]
    assert main(["build", str(page), "--check"]) == 0
    (page / "README.md").write_text("")
    assert main(["build", str(page), "--check"]) == 1 and (page / "README.md").read_text() == ""
    assert main(["build", str(page)]) == 0 and main(["build", str(page), "--check"]) == 0


def test_the_index_is_built_where_it_is_named(tmp_path) -> None:
    (tmp_path / "page.md").write_text("Pages.\n")
    assert main(["build", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == build.MARK + "Pages.\n"


def test_what_was_sent_where_and_with_which_commit(tmp_path) -> None:
    """Bytes of all rounds; the share of the dense size, of runs that were compressed alone."""
    sweep, page = tmp_path / "sweep", tmp_path / "mine"
    machine = {"processor": "P", "cores": 3, "gpu": None}
    facts = {"machine": machine, "versions": {"python": "3.11.7", "torch": "2.15.0+cu"}, "commit": "c" * 40}
    dense = make_run(sweep, "local", 0, summary=facts)
    small = make_run(sweep, "pgfed", 0, summary=facts | {"dirty": True})
    head, line = "round,train_s,images_per_s,bytes_up,bytes_down", "{},1,5,1000,2000"
    dense_lines = [head, *(line.format(t) for t in (1, 2, 3))]
    (dense / "costs.csv").write_text("\n".join(dense_lines) + "\n")
    more = [f"{x},{y}" for x, y in zip(dense_lines, ["dense_up,dense_down", *["4000,2000"] * 3])]
    (small / "costs.csv").write_text("\n".join(more) + "\n")
    assert main(["write", str(page), str(sweep), "--target", "0.7"]) == 0
    local, pgfed = sorted(rows(page / "runs.csv"), key=lambda row: row["method"])
    keys = ("mb_up", "mb_down", "part_up", "part_down", "mb_to_target")
    assert [float(pgfed[key]) for key in keys] == [0.003, 0.006, 0.25, 1, 0.006]
    assert local["part_up"] == "" and local["machine"] == "P, 3 cores, no GPU; Python 3.11, torch 2.15"
    assert (local["commit"], pgfed["commit"]) == ("c" * 12, "c" * 12 + " and changes")
    assert "| PGFed | 70.00 | 0.00 | 0.01 | 25.00 | 100.00 | 0.01 |" in (page / "README.md").read_text()
    header = (page / "curves.csv").read_text().splitlines()[0]
    scores = {"personal/accuracy", "personal/loss", "global/accuracy"}
    assert set(header.split(",")) == {"run", "round", "mb_up", "mb_down", "train_s"} | scores  # no _worst


def test_the_metric_is_what_the_runs_went_by(tmp_path) -> None:
    task = {"kind": "classification", "primary": "loss", "scores": {}}
    make_run(tmp_path / "sweep", "pgfed", 0, summary={"task": task})
    assert main(["write", str(tmp_path / "mine"), str(tmp_path / "sweep")]) == 0
    assert read_page(tmp_path / "mine").about["metric"] == "personal/loss"


def test_a_page_says_over_how_many_clients_a_mean_is(tmp_path, capsys) -> None:
    make_run(tmp_path / "runs", "fedavg", clients=np.array([[0.5, 0.6, 0.7, np.nan]] * 3))
    make_run(tmp_path / "runs", "pgfed")
    assert main(["write", str(tmp_path / "pages" / "few"), str(tmp_path / "runs")]) == 0
    page = read_page(tmp_path / "pages" / "few")
    assert page.runs["counted"].fillna("all").tolist() == ["all", "3 of 4"]
    lines = pipes((page.folder / "README.md").read_text())
    assert (
        "over clients" in lines[0]
        and any("| 3 of 4 |" in line for line in lines)
        and any("| all |" in x for x in lines)
    )


def test_a_damaged_run_is_no_part_of_a_page(sweep, tmp_path, capsys) -> None:
    next(iter(sweep.glob("pgfed-1*"))).joinpath("metrics.csv").write_text("round,personal/accuracy\n1\n")
    assert main(["write", str(tmp_path / "mine"), str(sweep)]) == 2
    assert "part main of the page has damaged runs (" in capsys.readouterr().err and not (tmp_path / "mine").exists()


def test_a_row_is_a_run(sweep, tmp_path) -> None:
    page = tmp_path / "mine"
    assert main(["write", str(page), str(sweep)]) == 0
    runs = {(r["method"], r["seed"]): r for r in rows(page / "runs.csv")}
    assert len(runs) == 7 and all(r["n"] == "1" and r["form"] == "full" for r in runs.values())
    mine = runs["pgfed", "1"]
    assert (mine["last"], mine["best"], mine["best_round"]) == ("0.73", "0.77", "2")  # 0.65 + 0.08, 0.65 + 0.12
    assert mine["gain_last"] == "0.07" and runs["local", "1"]["gain_last"] == ""
    assert runs["apple", "0"]["status"] == "failed" and runs["apple", "0"]["last"] == ""
    curve = [r for r in rows(page / "curves.csv") if r["run"] == mine["run"]]
    assert [(r["round"], r["personal/accuracy"]) for r in curve] == [("1", "0.65"), ("2", "0.77"), ("3", "0.73")]
    assert [float(r["train_s"]) for r in curve] == [2, 6, 12]  # so far
    gains = {line: [r for r in rows(page / "gains.csv") if r["group"] == line] for line in ("PGFed", "FedAvg")}
    assert [float(r["gain"]) for r in gains["PGFed"]] == pytest.approx([0.07] * 4)
    assert [float(r["gain_std"]) for r in gains["FedAvg"]] == pytest.approx([0.005] * 4)  # of 0.01 and 0.02
    assert {r["gain_n"] for r in gains["FedAvg"]} == {"2"}


def test_what_people_wrote_stays_and_other_parts_too(sweep, tmp_path) -> None:
    page = tmp_path / "mine"
    assert main(["write", str(page), f"a={sweep}", f"b={sweep}"]) == 0
    about = json.loads((page / "page.json").read_text())
    about["figures"]["curves_a"]["alt"] = "mine"
    (page / "page.json").write_text(json.dumps(about))
    (page / "page.md").write_text("Mine alone.\n" + (page / "page.md").read_text())
    other = tmp_path / "other"
    make_run(other, "ditto", 5)
    make_run(other, "local", 5)
    assert main(["write", str(page), f"b={other}"]) == 0
    found = read_page(page)
    assert found.about["figures"]["curves_a"]["alt"] == "mine"
    groups = found.gains[["part", "group"]].drop_duplicates().values.tolist()
    assert groups == [["a", "PGFed"], ["a", "FedAvg"], ["b", "Ditto"]]
    assert (page / "README.md").read_text().splitlines()[1] == "Mine alone."
    methods = {part: set(rows["method"]) for part, rows in found.runs.groupby("part")}
    assert methods == {"b": {"ditto", "local"}, "a": {"local", "fedavg", "pgfed", "apple"}}
    assert set(found.curves["run"].str.split("/").str[0]) == {"a", "b"} and len(found.curves) == 6 * 3 + 2 * 3


def test_commands_name_no_place_of_this_machine(tmp_path) -> None:
    paths = "dataset.path=/home/me/x.npz sweep_dir=sweeps/a data_dir=/z 'dataset.b=[/d/e.zip,/d/f]'"
    command = f"python -m fedbench -m algorithm=pgfed {paths}"
    run = make_run(tmp_path / "sweep", "pgfed", 0, summary={"command": command})
    assert run.is_dir() and main(["write", str(tmp_path / "mine"), str(tmp_path / "sweep")]) == 0
    text = (tmp_path / "mine" / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("uv run"))
    assert line.endswith("dataset.path=x.npz sweep_dir=sweeps/a data_dir=z 'dataset.b=[e.zip,f]'")


def test_cells_are_full_reduced_or_not_run(tmp_path, monkeypatch, capsys) -> None:
    conf = tmp_path / "conf"
    (conf / "experiment" / "t").mkdir(parents=True)
    sweep = tmp_path / "sweep"
    for method, names in (("PGFed", "t/pgfed"), ("Local", "t/local,reduced/tenth")):
        block = {"table": TABLE, "dataset": "CIFAR10", "clients": 25, "method": method}
        (conf / "experiment" / "t" / f"{method.lower()}.yaml").write_text(yaml.safe_dump({"paper": block}))
        for seed in (0, 1):
            config = {"paper": block, "choices": {"experiment": names}}
            make_run(sweep, method.lower(), seed, (0.0, 0.1 + 0.01 * seed, 0.0), config=config)
    monkeypatch.setattr("fedbench.config.conf_tree.find_conf_dir", lambda: conf)
    page = tmp_path / "mine"
    assert main(["write", str(page), str(sweep), "--paper", TABLE]) == 0
    cells = {(r["method"], r["dataset"], r["clients"]): r for r in rows(page / "cells.csv")}
    assert cells["PGFed", "CIFAR10", "25"]["form"] == "full" and cells["Local", "CIFAR10", "25"]["form"] == "reduced"
    assert cells["FedAvg", "CIFAR10", "25"]["form"] == "not run" and cells["PGFed", "CIFAR10", "50"]["ours"] == ""
    assert {r["method"]: r["form"] for r in rows(page / "runs.csv")} == {"pgfed": "full", "local": "reduced"}
    capsys.readouterr()
    report([str(sweep), "--paper", TABLE, "--format", "markdown"])
    reported = [line for line in pipes(capsys.readouterr().out) if "±" in line]
    text = (page / "README.md").read_text()
    assert "dataset CIFAR10; clients 25" in text  # of what was run: said above the table
    shown = [line for line in pipes(text.partition("pgfed_table1_cifar: ")[2]) if line[2:7] in ("Local", "PGFed")]
    assert len(shown) == 2 and shown == reported


def test_what_is_tuned_at_the_end_is_marked_in_the_data(tmp_path, monkeypatch) -> None:
    block = {"table": TABLE, "dataset": "CIFAR10", "clients": 25, "method": "FedBABU"}
    make_run(tmp_path / "sweep", "fedbabu", config={"paper": block}, summary={"tuned_at_end": True})
    make_run(tmp_path / "sweep", "pgfed")
    assert main(["write", str(tmp_path / "mine"), str(tmp_path / "sweep"), "--paper", TABLE]) == 0
    runs = {row["method"]: row["tuned_at_end"] for row in rows(tmp_path / "mine" / "runs.csv")}
    assert runs == {"fedbabu": "1", "pgfed": ""}
    marked = [row for row in rows(tmp_path / "mine" / "cells.csv") if row["tuned_at_end"]]
    assert [(row["method"], row["clients"]) for row in marked] == [("FedBABU", "25")]
    assert (tmp_path / "mine" / "README.md").read_text().count("| FedBABU† |") == 2


def test_a_metric_of_its_own(sweep, tmp_path) -> None:
    page = tmp_path / "mine"
    assert main(["write", str(page), str(sweep), "--metric", "personal/loss", "--target", "0.3"]) == 0
    assert read_page(page).about["percent"] is False
    best = [line.split(" | ") for line in pipes((page / "README.md").read_text())][2:5]
    assert [line[0] for line in best] == ["| PGFed", "| FedAvg", "| Local"]  # the smallest loss first
    assert best[0][1] == "0.2700 ± 0.0000" and build.differences(build.build_page(page)) == []


def test_a_table_without_rows_has_no_file(sweep, tmp_path) -> None:
    page = read_page_of(sweep, tmp_path)
    assert (page.folder / "gains.csv").is_file()
    page.gains = pd.DataFrame()
    write_page(page)
    assert not (page.folder / "gains.csv").exists() and read_page(page.folder).gains.empty


def read_page_of(sweep: Path, tmp_path: Path) -> Page:
    assert main(["write", str(tmp_path / "mine"), str(sweep)]) == 0
    return read_page(tmp_path / "mine")


def test_what_cannot_be_read_is_said(tmp_path, capsys) -> None:
    assert main(["write", str(tmp_path / "mine"), str(tmp_path / "gone")]) == 2
    assert "gone is not a folder" in capsys.readouterr().err and not (tmp_path / "mine").exists()
    assert main(["build", str(tmp_path)]) == 2
    assert "has no page.md" in capsys.readouterr().err
