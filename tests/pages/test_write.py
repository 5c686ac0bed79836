"""Run folders become a page's data, and what people wrote of a page stays."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from run_folders import make_run

from fedbench.pages import build
from fedbench.pages.__main__ import main
from fedbench.pages.store import read_page
from fedbench.report.__main__ import main as report

pytest.importorskip("jinja2", reason="pages need jinja2: pip install 'fedbench[report]'")
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


def test_a_page_shows_the_tables_of_the_report(sweep, tmp_path, capsys) -> None:
    page = tmp_path / "results" / "mine"
    assert main(["write", str(page), str(sweep), "--title", "Mine"]) == 0
    capsys.readouterr()
    report([str(sweep), "--format", "markdown"])
    reported = pipes(capsys.readouterr().out.split("**not finished**")[0])
    assert pipes((page / "README.md").read_text()) == reported and len(reported) == 5 + 4
    assert main(["build", str(page), "--check"]) == 0


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
    gains = [float(r["gain"]) for r in rows(page / "gains.csv") if r["group"] == "pgfed"]
    assert gains == pytest.approx([0.07] * 4)


def test_what_people_wrote_stays_and_other_parts_too(sweep, tmp_path) -> None:
    page = tmp_path / "mine"
    assert main(["write", str(page), f"a={sweep}", f"b={sweep}"]) == 0
    about = json.loads((page / "page.json").read_text())
    about["tables"]["results_a"]["columns"] = ["last"]
    (page / "page.json").write_text(json.dumps(about))
    (page / "page.md").write_text("Mine alone.\n" + (page / "page.md").read_text())
    other = tmp_path / "other"
    make_run(other, "ditto", 5)
    make_run(other, "local", 5)
    assert main(["write", str(page), f"b={other}"]) == 0
    found = read_page(page)
    assert found.about["tables"]["results_a"]["columns"] == ["last"]
    assert (page / "README.md").read_text().splitlines()[1] == "Mine alone."
    assert {r["method"] for r in found.runs if r["part"] == "b"} == {"ditto", "local"}
    assert {r["method"] for r in found.runs if r["part"] == "a"} == {"local", "fedavg", "pgfed", "apple"}
    assert {r["run"].split("/")[0] for r in found.curves} == {"a", "b"} and len(found.curves) == 6 * 3 + 2 * 3


def test_commands_name_no_place_of_this_machine(tmp_path) -> None:
    paths = "dataset.path=/home/me/x.npz sweep_dir=sweeps/a data_dir=/z 'dataset.b=[/d/e.zip,/d/f]'"
    command = f"python -m fedbench -m algorithm=pgfed {paths}"
    run = make_run(tmp_path / "sweep", "pgfed", 0, summary={"command": command})
    assert run.is_dir() and main(["write", str(tmp_path / "mine"), str(tmp_path / "sweep")]) == 0
    text = (tmp_path / "mine" / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("    uv run"))
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
    monkeypatch.setattr("fedbench.pages.collect.find_conf_dir", lambda: conf)
    monkeypatch.setattr("fedbench.cli.conf_tree.find_conf_dir", lambda: conf)
    page = tmp_path / "mine"
    assert main(["write", str(page), str(sweep), "--paper", TABLE]) == 0
    cells = {(r["method"], r["dataset"], r["clients"]): r for r in rows(page / "cells.csv")}
    assert cells["PGFed", "CIFAR10", "25"]["form"] == "full" and cells["Local", "CIFAR10", "25"]["form"] == "reduced"
    assert cells["FedAvg", "CIFAR10", "25"]["form"] == "not run" and cells["PGFed", "CIFAR10", "50"]["ours"] == ""
    assert {r["method"]: r["form"] for r in rows(page / "runs.csv")} == {"pgfed": "full", "local": "reduced"}
    capsys.readouterr()
    report([str(sweep), "--paper", TABLE, "--format", "markdown"])
    reported = [line for line in pipes(capsys.readouterr().out) if "CIFAR10 | 25" in line and "not run" not in line]
    shown = [line for line in pipes((page / "README.md").read_text()) if "CIFAR10 | 25" in line]
    assert shown == [line for line in reported if "±" in line] and len(shown) == 2


def test_a_metric_of_its_own(sweep, tmp_path) -> None:
    page = tmp_path / "mine"
    assert main(["write", str(page), str(sweep), "--metric", "personal/loss", "--target", "0.3"]) == 0
    assert read_page(page).about["percent"] is False
    best = [line.split(" | ") for line in pipes((page / "README.md").read_text())][2:5]
    assert [line[0] for line in best] == ["| pgfed", "| fedavg", "| local"]  # the smallest loss first
    assert best[0][2] == "0.2700 ± 0.0000" and build.differences(build.make(page)) == []


def test_what_cannot_be_read_is_said(tmp_path, capsys) -> None:
    assert main(["write", str(tmp_path / "mine"), str(tmp_path / "gone")]) == 1
    assert "gone is not a folder" in capsys.readouterr().err and not (tmp_path / "mine").exists()
    assert main(["build", str(tmp_path)]) == 1
    assert "has no page.md" in capsys.readouterr().err
