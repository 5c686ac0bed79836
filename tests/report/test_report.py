"""Tables say what the files say: means and spreads are recomputed here from the numbers behind the runs."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from run_folders import make_run, with_checkpoint

from fedbench.core.options import ConfigError
from fedbench.report import drawing, scores
from fedbench.report.command import main
from fedbench.report.drawing import escape_mathtext
from fedbench.report.figures import draw_against, values_by_key
from fedbench.report.figures_command import main as figures_main
from fedbench.report.runs import Run, find_runs
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs, over_seeds
from fedbench.report.table import Column, Spread, Table, escape_latex, format_cell, render


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Local, FedAvg and PGFed over three seeds, PGFed with one more run unfinished."""
    folder = tmp_path / "sweep"
    for seed in range(3):
        make_run(folder, "local", seed, (0.0, 0.0, 0.0))
        make_run(folder, "fedavg", seed, (-0.2, -0.1 + 0.01 * seed, -0.1), summary={"personal_is_global": True})
        make_run(folder, "pgfed", seed, (0.0, 0.1 + 0.01 * seed, 0.05 + 0.02 * seed))
    with_checkpoint(make_run(folder, "pgfed", 3, (0.0,), status="running", summary={"rounds_done": 1}))
    return folder


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def table_of(capsys, *args: str) -> list[dict[str, str]]:
    assert main([*args, "--format", "csv"]) == 0
    return read_csv(capsys.readouterr().out)


def make_started(folder: Path, seed: int) -> Path:
    """A run of Ditto that ended before its first round: only its configuration is there."""
    path = make_run(folder, "ditto", seed)
    for file in path.glob("*.*"):
        if file.name != "config.yaml":
            file.unlink()
    return path


def test_csv_of_a_sweep(sweep, capsys):
    """pgfed ends at .65 + .05 + .02 s: .70 .72 .74, mean .72, std .02 sqrt(2/3); its best is .75 .76 .77."""
    rows = {row["method"]: row for row in table_of(capsys, str(sweep), "--target", "0.74")}
    assert list(rows) == ["pgfed", "local", "fedavg"]  # by the last mean
    pgfed = rows["pgfed"]
    std = np.sqrt(2 / 3)
    expected = {
        "n": 3,
        "last_mean": 0.72,
        "last_std": 0.02 * std,
        "last_n": 3,
        "best_mean": 0.76,
        "best_std": 0.01 * std,
    }
    expected |= {"worst_mean": 0.57, "global_mean": 0.42, "gain_last_mean": 0.07, "images_per_s_mean": 1001}
    expected |= {"rounds_to_target_mean": 2, "seconds_to_target_mean": 2 + 4}
    assert {name: float(pgfed[name]) for name in expected} == pytest.approx(expected)
    assert float(rows["fedavg"]["gain_last_mean"]) == pytest.approx(-0.1)
    assert rows["local"]["gain_last_mean"] == ""
    assert rows["local"]["global_mean"] == ""
    assert (rows["local"]["rounds_to_target_mean"], rows["local"]["rounds_to_target_n"]) == ("", "0")


def test_text_of_a_sweep(sweep, capsys):
    assert main([str(sweep), "--target", "0.74"]) == 0
    text = capsys.readouterr().out
    head, notes, left = map(text.index, ("personal/accuracy (%)", "± is the population", "not finished"))
    assert head < notes < left
    assert "digits, dirichlet partition, mlp, 4 clients, 2 a round, 3 rounds" in text
    lines = {line.split()[0]: line for line in text[head:notes].splitlines() if line.strip()}
    assert "72.00 ± 1.63" in lines["PGFed"]
    assert "76.00 ± 0.82" in lines["PGFed"]
    assert "never" in lines["Local"]
    assert "best by val" not in lines["method"]
    assert text[head:].partition("\n")[0].endswith("3 rounds, n = 3") and lines["method"].split()[1] == "last"
    assert "personal equals global for FedAvg" in text
    assert f"resume={sweep / 'pgfed-3-9'}" in text[left:]
    assert "interrupted" in text[left:]
    assert "1 of 3" in text[left:]
    assert "over clients: " not in text and "  over clients  " not in text


def test_selection_orders_and_says_where_worst_and_global_come_from(tmp_path, capsys):
    make_run(tmp_path, "a", curve=(0.0, 0.2, 0.0), summary={"best_val": {"round": 1, "values": {}}})
    make_run(tmp_path, "b", curve=(0.0, 0.1, 0.1))
    last, best = (table_of(capsys, str(tmp_path), "--select", select) for select in ("last", "best"))
    assert [row["method"] for row in last] == ["b", "a"]
    assert [row["method"] for row in best] == ["a", "b"]
    assert [float(row["worst_mean"]) for row in (last[1], best[0])] == pytest.approx([0.5, 0.7])
    assert float(best[0]["best_val_mean"]) == pytest.approx(0.65)
    by_val = table_of(capsys, str(tmp_path), "--select", "best_val")
    assert [row["method"] for row in by_val] == ["a", "b"]
    assert float(by_val[0]["worst_mean"]) == pytest.approx(0.5)
    assert by_val[1]["worst_mean"] == ""


def test_two_conventions_of_gain(tmp_path):
    """At the last round, and of each client at its best round in both runs."""
    local = Run(make_run(tmp_path, "local", clients=np.array([[0.5, 0.1, 0.2, 0.2], [0.1, 0.9, 0.2, 0.2]])))
    ours = Run(make_run(tmp_path, "pgfed", clients=np.array([[0.9, 0.2, 0.3, np.nan], [0.3, 0.6, 0.3, 0.1]])))
    assert list(scores.gains(ours, local, "personal/accuracy")) == pytest.approx([0.2, -0.3, 0.1, -0.1])
    own_best = [0.4, -0.3, 0.1, -0.1]
    assert list(scores.gains(ours, local, "personal/accuracy", own_best=True)) == pytest.approx(own_best)
    # 1 - accuracy, so that a gain is a gain
    assert list(scores.gains(ours, local, "personal/loss", own_best=True)) == pytest.approx(own_best)
    assert scores.gains(ours, None, "personal/accuracy").empty


def test_local_is_matched_by_data_partition_and_seed(tmp_path):
    ours = Run(make_run(tmp_path, "pgfed", 1))
    others = [
        make_run(tmp_path, "local", 0),
        make_run(tmp_path, "local", 1, summary={"partition_hash": "p1"}),
        make_run(tmp_path, "local", 1, summary={"dataset": "mnist"}),
        make_run(tmp_path, "local", 1, status="running"),
        make_run(tmp_path, "local", 1, config={"finetune": {"epochs": 2}}),
    ]
    assert scores.local_of(ours, [Run(path) for path in others]) is None
    unlike = Run(make_run(tmp_path, "local", 1, config={"optimizer": {"lr": 9.0}}))
    alike = Run(make_run(tmp_path, "local", 1))
    assert scores.local_of(ours, [unlike, alike]) is alike


def test_namesakes_are_told_apart_by_what_differs(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path, "pgfed", seed, config={"algorithm": {"mu": 0.1}})
        make_run(tmp_path, "pgfed", seed, config={"algorithm": {"mu": 0.2}})
        make_run(tmp_path, "fedavg", seed)
    groups, repeated = group_runs(find_runs([tmp_path]))
    assert repeated == 0
    assert {g.name: len(g.runs) for g in groups} == {"FedAvg": 2, "PGFed mu=0.1": 2, "PGFed mu=0.2": 2}
    assert main([str(tmp_path)]) == 0
    assert "PGFed   0.1  70.00" in capsys.readouterr().out


def test_methods_are_compared_within_a_setting(tmp_path, capsys):
    """alpha is of the setting: rows, figures and partitions are told apart by it; mu is of the method."""
    for method in ("a", "b"):
        for alpha, height in ((10.0, 0.2), (2.0, 0.1)):
            about = {"partition": {"alpha": alpha}}
            make_run(tmp_path, method, 0, (height,), config=about, summary={"partition_hash": str(alpha)})
    rows = table_of(capsys, str(tmp_path))
    assert [row["alpha"] for row in rows] == ["2.0", "2.0", "10.0", "10.0"]
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert "compare with care" not in capsys.readouterr().out
    assert len(list((tmp_path / "figures").glob("curves_*alpha_2.0*.png"))) == 1
    groups, _ = group_runs(find_runs([tmp_path]))
    assert {group.name for group in groups} == {"a", "b"}


def test_data_set_becomes_a_column_where_it_differs(tmp_path, capsys):
    make_run(tmp_path, "fedavg", config={"choices": {"dataset": "mnist"}})
    make_run(tmp_path, "fedavg")
    rows = table_of(capsys, str(tmp_path))
    assert [(row["method"], row["dataset"]) for row in rows] == [("fedavg", "digits"), ("fedavg", "mnist")]


def test_of_repeated_runs_the_latest_counts(tmp_path, capsys):
    make_run(tmp_path, "pgfed", 0, (0.3,), summary={"finished": "2026-02-01"})
    make_run(tmp_path, "pgfed", 0, (0.1,), summary={"finished": "2026-01-01"})
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "95.00" in text
    assert "1 earlier runs" in text


def test_group_by_keys(tmp_path, capsys):
    for mu in (0.1, 0.2):
        for seed in (0, 1):
            make_run(tmp_path, "pgfed", seed, (mu,), config={"algorithm": {"mu": mu}})
    rows = table_of(capsys, str(tmp_path), "--group", "algorithm,seed")
    assert [(row["algorithm"], row["seed"], row["n"]) for row in rows] == [("pgfed", "0", "2"), ("pgfed", "1", "2")]
    rows = table_of(capsys, str(tmp_path), "--group", "algorithm.mu")
    assert [(row["algorithm.mu"], row["n"]) for row in rows] == [("0.2", "2"), ("0.1", "2")]


def test_different_partitions_are_pointed_out(tmp_path, capsys):
    make_run(tmp_path, "pgfed")
    make_run(tmp_path, "fedavg", summary={"partition_hash": "p1"})
    main([str(tmp_path)])
    assert (
        "dataset digits, partition dirichlet, model mlp: the runs have 2 different partitions"
        in capsys.readouterr().out
    )


def test_loss_is_ordered_upwards_and_not_in_percent(sweep, capsys):
    assert main([str(sweep), "--metric", "personal/loss", "--target", "0.26"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("personal/loss: ")
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["PGFed", "Local", "FedAvg"]
    assert "0.2800 ± 0.0163" in text


@pytest.mark.parametrize("when", ["before counts were kept", "kept"])
def test_a_mean_says_over_how_many_clients_it_is(tmp_path, capsys, when):
    """The score is not defined for the last of four clients."""
    clients = np.array([[0.5, 0.6, 0.7, np.nan], [0.6, 0.7, 0.8, np.nan]])
    kept = {"evaluated_clients": 4, "rounds_done": 3, "last": {"personal/accuracy": 0.7}}
    kept["last"]["personal/accuracy_clients"] = 3
    make_run(tmp_path, "pgfed", clients=clients, summary=kept if when == "kept" else None)
    make_run(tmp_path, "fedavg", summary={"evaluated_clients": 4})
    make_run(tmp_path, "ditto", config={"eval": {"clients": 2}}, summary={"evaluated_clients": 2})
    if when == "kept":  # as metrics.csv has it of a run whose first row says so
        path = next(tmp_path.glob("pgfed*")) / "metrics.csv"
        header, *lines = path.read_text().splitlines()
        path.write_text("\n".join([f"{header},personal/accuracy_clients", *(f"{line},3" for line in lines)]) + "\n")
    rows = {row["method"]: row["counted"] for row in table_of(capsys, str(tmp_path))}
    assert rows == {"pgfed": "3 of 4", "fedavg": "", "ditto": "2 of 4"}
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "  3 of 4  " in text and "over clients: the number of clients in the means" in text


def test_failed_runs_show_their_error(tmp_path, capsys):
    path = make_run(tmp_path, status="failed")
    (path / "error.txt").write_text("loss is not finite at round 2\nmore\n")
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no run has finished yet" in text
    assert "failed: loss is not finite at round 2" in text
    assert "start it again: it has no checkpoint" in text and "resume=" not in text
    with_checkpoint(path)
    assert main([str(tmp_path)]) == 0
    assert f"python -m fedbench resume={path}" in capsys.readouterr().out


def test_cells_that_failed_before_their_first_round_are_listed(sweep, capsys):
    """They have no summary.json and no metrics.csv, but what the sweep left of them: a config and an error."""
    path = make_started(sweep, 5)
    assert main([str(sweep)]) == 0
    assert str(path) not in capsys.readouterr().out
    (path / "error.txt").write_text("more clients than samples\n")
    assert main([str(sweep)]) == 0
    said = f"1 run failed before the first round; {path}, failed: more clients than samples\n"
    assert said in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"no run has finished yet\n\n{said}"


def test_failed_starts_take_one_line(sweep, capsys):
    """However many: their number and the first reason; a run that failed later can go on and keeps its row."""
    for seed in range(5, 25):
        path = make_started(sweep, seed)
        (path / "error.txt").write_text("more clients than samples\n" if seed < 24 else "no memory\n")
    late = with_checkpoint(make_run(sweep, "apple", status="failed"))
    assert main([str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("ditto" in line for line in lines) == 1 and sum(str(late) in line for line in lines) == 1
    (line,) = (line for line in lines if "ditto" in line)
    assert line.startswith(f"20 runs failed before the first round; the first, {sweep / 'ditto-'}")
    assert line.endswith("failed: more clients than samples (1 other reason: see error.txt)")


def test_run_that_died_before_its_summary_is_listed(tmp_path, capsys):
    path = make_run(tmp_path)
    (path / "summary.json").unlink()
    with (path / "metrics.csv").open("a") as file:
        file.write("4,0.5")  # cut off
    assert main([str(tmp_path)]) == 0
    assert "no summary.json  3 of 3" in capsys.readouterr().out


def test_a_killed_run_has_the_rounds_of_its_files(tmp_path, capsys):
    """Its summary is from before round 1; a last line cut by the kill, even between two digits, does not count."""
    path = with_checkpoint(make_run(tmp_path, status="running", summary={"rounds": 2000, "rounds_done": 0}))
    for name, line in (("metrics.csv", "4,0.7,0.6,0.3,0."), ("costs.csv", "4,8.0,100.0,10"), ("clients.csv", "4,0,9")):
        with (path / name).open("a") as file:
            file.write(line)
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "interrupted  3 of 2000" in shown and "damaged" not in shown
    assert list(Run(path).clients("personal/accuracy").index) == [1, 2, 3]


def test_a_run_killed_before_its_first_round_is_listed(sweep, capsys):
    path = make_started(sweep, 5)
    (path / "status.json").write_text(json.dumps({"status": "running"}))
    assert main([str(sweep)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(str(path)))
    assert "interrupted" in line and "0 of 3" in line and "start it again" in line


BEST = {"metric": "personal/accuracy", "round": "two", "values": {}}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("summary.json", b"{", "summary.json cannot be read"),
        ("summary.json", b"[1]", "summary.json cannot be read"),
        ("summary.json", b"\xff\x00\x80", "summary.json cannot be read"),
        ("summary.json", {"rounds": "three"}, "rounds must be a number, got 'three'"),
        ("summary.json", {"seed": [1]}, "seed must be a number, got [1]"),
        ("summary.json", {"cost": {"images_per_s": "fast"}}, "cost.images_per_s must be a number, got 'fast'"),
        ("summary.json", {"best_val": 3}, "best_val must be a mapping, got 3"),
        ("summary.json", {"best": BEST}, "best.round must be a number, got 'two'"),
        ("summary.json", {"algorithm": 7}, "algorithm must be text, got 7"),
        ("config.yaml", b"a: [1", "config.yaml is damaged"),
        ("config.yaml", b"\xff\x00\x80", "config.yaml is damaged"),
        ("config.yaml", b"- 1", "config.yaml is damaged: it is not a mapping"),
        ("config.yaml", b"choices: [1]", "config.yaml is damaged: choices is [1], not a mapping"),
        ("config.yaml", None, "the file config.yaml is missing"),
        ("metrics.csv", None, "the file metrics.csv is missing"),
        ("metrics.csv", b"", "its tables end at round"),
        ("metrics.csv", b"round,personal/accuracy\n1,abc\n", "metrics.csv is damaged: Unable to parse string 'abc'"),
        ("metrics.csv", b"round,personal/accuracy\n1\n2,0.5\n", "metrics.csv is damaged: line 2 does not have 2 cells"),
        ("metrics.csv", b"\xff\x00\x80\n", "metrics.csv is damaged"),
        ("costs.csv", b"round,train_s\n1,\x00\n", "costs.csv is damaged"),
        (".hydra/overrides.yaml", b"a: [1", "overrides.yaml is damaged"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_reported(sweep, capsys, name, content, words):
    bad = make_run(sweep, "ditto", 7)
    (bad / ".hydra").mkdir()
    if content is None:
        (bad / name).unlink()
    elif isinstance(content, dict):
        (bad / name).write_text(json.dumps(json.loads((bad / name).read_text()) | content))
    else:
        (bad / name).write_bytes(content)
    if words.startswith("its tables"):
        (bad / "costs.csv").write_bytes(content)
        (bad / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 3, "rounds_done": 0}))
    assert main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("personal/accuracy (%): ") and "pgfed" in said and "ditto  " not in said
    (line,) = [line for line in said.splitlines() if line.startswith("damaged, left out: ")]
    assert str(bad) in line and words in line
    assert {row["method"] for row in table_of(capsys, str(sweep))} == {"local", "fedavg", "pgfed"}
    assert main([str(sweep), "--format", "csv"]) == 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff\x00\n", b"round,client,personal/accuracy\n1,0,abc\n"])
def test_clients_that_cannot_be_read_are_named(sweep, capsys, content):
    bad = make_run(sweep, "ditto", 0)
    (bad / "clients.csv").unlink() if content is None else (bad / "clients.csv").write_bytes(content)
    rows = {row["method"]: row for row in table_of(capsys, str(sweep))}
    assert rows["ditto"]["last_mean"] and not rows["ditto"]["gain_last_mean"] and rows["pgfed"]["gain_last_mean"]
    assert main([str(sweep)]) == 0
    assert f"damaged, without its clients: {bad}: clients.csv is " in capsys.readouterr().out


def test_a_run_stored_under_an_options_name_is_reported_under_its_classs(tmp_path, capsys):
    """As runs of model._target_=my.Net and algorithm._target_=my.Method once were."""
    own = {"algorithm": {"_target_": "my.Method"}, "model": {"_target_": "my.Net"}}
    make_run(tmp_path, "pgfed", config=own)
    make_run(tmp_path, "pgfed", config=own, seed=1, summary={"name": "ours"})
    make_run(tmp_path, "pgfed", config=own, seed=2, summary={"name": "pgfed+ft"})
    make_run(tmp_path, "local", config={"algorithm": {"_target_": "my.Method"}})
    make_run(tmp_path, "pgfed", config={"algorithm": {"_target_": "fedbench.engine.elsewhere.PGFed"}})  # its file moved
    rows = table_of(capsys, str(tmp_path))
    names = sorted(f"{row['method']} {row['model']}" for row in rows)
    assert names == ["Method Net", "Method mlp", "Method+ft Net", "ours Net", "pgfed mlp"]
    assert not any(scores.is_local(run) for run in find_runs([tmp_path]))


def test_a_name_is_no_part_of_a_table(tmp_path, capsys):
    """A formula would be computed by a spreadsheet, a line break would be a row, dollars a formula of matplotlib's."""
    for seed, name in enumerate(("=1+1", "two\nlines", "$x$ \\frac", "_hidden")):
        make_run(tmp_path, seed=seed, summary={"name": name})
    rows = table_of(capsys, str(tmp_path))
    assert {row["method"] for row in rows} == {"'=1+1", "two\\nlines", "$x$ \\frac", "_hidden"}
    assert main([str(tmp_path)]) == 0
    assert "two\\nlines" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert escape_mathtext("_a$") == r" _a\$"


def test_a_metric_without_a_direction_is_refused(sweep, capsys):
    """The letters loss in a name do not make it one."""
    for path in sweep.rglob("metrics.csv"):
        path.write_text(path.read_text().replace("personal/loss", "personal/lossless"))
    assert main([str(sweep), "--metric", "personal/lossless"]) == 2
    assert "the metric personal/lossless is unknown" in capsys.readouterr().err


def test_figures_of_sound_runs_are_drawn(sweep, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = sorted(sweep.glob("pgfed-*"))[0]
    (folder / "metrics.csv").write_text("round,personal/accuracy\n1,abc\n")
    other = sorted(sweep.glob("fedavg-*"))[0]
    (other / "clients.csv").write_bytes(b"\xff\x00\n")
    keep = sorted(sweep.glob("local-*"))[0]
    assert figures_main([str(folder), str(other), str(keep), "--out", str(tmp_path / "drawn")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in said] == [
        ["damaged, left out", str(folder)],
        ["damaged, not all drawn", str(other)],
    ]
    assert [path.name for path in (tmp_path / "drawn").glob("*_run.png")] == [f"{keep.name}_run.png"]


def test_out_file_decides_the_format(sweep, tmp_path, capsys):
    assert main([str(sweep), "--out", str(tmp_path / "new" / "table.md")]) == 0
    assert (tmp_path / "new" / "table.md").read_text().startswith("**personal/accuracy")
    assert main([str(sweep), "--out", str(tmp_path / "table.csv")]) == 0
    assert len(read_csv((tmp_path / "table.csv").read_text())) == 3
    assert main([str(sweep), "--out", str(tmp_path / "table.docx")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "must end in .txt, .md, .csv, .tex, .json, .html; or choose a --format" in said.err
    assert main([str(sweep), "--out", str(tmp_path / "table.docx"), "--format", "latex"]) == 0


def test_latex_of_a_sweep(sweep, tmp_path, capsys):
    """A row a line, all of as many cells; characters that mean something else to LaTeX are written out."""
    assert main([str(sweep), "--out", str(tmp_path / "table.tex")]) == 0
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[:3] == [r"\begin{table}", r"\centering", r"\caption{" + lines[2].removeprefix(r"\caption{")]
    assert lines[2].startswith(r"\caption{personal/accuracy (\%)")
    top, bottom = lines.index(r"\midrule"), lines.index(r"\bottomrule")
    assert any(line.startswith(r"PGFed & 72.00 $\pm$ 1.63 &") for line in lines[top:bottom])
    assert {line.count(" & ") for line in lines[top + 1 : bottom]} == {lines[top - 1].count(" & ")}
    assert all(line.endswith(r" \\") for line in lines[top + 1 : bottom])
    assert escape_latex(r"a_b & 5% {x} \ ~^#$") == (
        r"a\_b \& 5\% \{x\} \textbackslash{} \textasciitilde{}\textasciicircum{}\#\$"
    )
    notes = lines[lines.index(r"\end{table}") + 1 :]
    assert any(line.startswith("% ") and "population standard deviation" in line for line in notes)


def test_json_and_html_of_a_sweep(sweep, tmp_path, capsys):
    """JSON has the numbers of the CSV, in full; HTML is for readers, with escaped names."""
    make_run(sweep, "apfl", summary={"name": "<b>&"})
    rows = {row["method"]: row for row in table_of(capsys, str(sweep))}
    assert main([str(sweep), "--out", str(tmp_path / "table.json")]) == 0
    for found in json.loads((tmp_path / "table.json").read_text()):
        expected = rows[found["method"]]
        assert {key: "" if value is None else str(value) for key, value in found.items()} == expected
    assert main([str(sweep), "--format", "html"]) == 0
    page = capsys.readouterr().out
    ET.fromstring(f"<html>{page}</html>")
    assert "<caption>personal/accuracy (%): digits" in page and "72.00 ± 1.63</td>" in page
    assert ">&lt;b&gt;&amp;</td>" in page and "<p>± is the population" in page


def test_every_column_is_explained_below(tmp_path, capsys):
    """Of a table with all columns there are; the labels are the configuration's."""
    costs = "round,train_s,bytes_up,bytes_down,dense_up,dense_down\n" + "".join(
        f"{t},1,10,20,30,40\n" for t in (1, 2, 3)
    )
    for method, curve in (("local", (0.0, 0.0)), ("pgfed", (0.1, 0.2)), ("ditto", (0.2, 0.1))):
        kept = {"best_val": {"round": 2, "values": {}}, "evaluated_clients": 4 if method == "local" else 3}
        (make_run(tmp_path, method, curve=(0.0, *curve), summary=kept) / "costs.csv").write_text(costs)
    assert main([str(tmp_path), "--target", "0.66"]) == 0
    text = capsys.readouterr().out
    tables, notes = text.split("± is the population")
    heads = [line for line in tables.splitlines() if line.startswith("method ")]
    columns = {title for line in heads for title in re.split(r"  +", line)} - {"method"}
    assert {"last", "gain@last", "over clients", "best by val", "MB up", "up (% of dense)"} <= columns
    for title in columns:
        word = re.sub("^(MB).*|.*(% of dense).*", lambda m: m.group(1) or m.group(2), title)
        assert f"{word}: " in notes, title


def test_runs_are_grouped_by_their_data_and_not_by_where_or_how_they_ran(tmp_path):
    """A folder of data, threads and callbacks do not define a run; its data and its precision do."""
    for seed, more in enumerate(({"threads": 1}, {"threads": 4}, {"precision": "bf16"})):
        config = {"hardware": more, "callbacks": {str(seed): {}}, "data_dir": f"/data{seed}"}
        config |= {"dataset": {"path": f"/data{seed}/x.npz"}}
        make_run(tmp_path, "pgfed", seed, config=config, summary={"data_hash": "abc"})
    groups, _ = group_runs(find_runs([tmp_path]))
    assert sorted((len(g.runs), g.labels["precision"]) for g in groups) == [(1, "bf16"), (2, None)]
    make_run(tmp_path, "pgfed", 0, config=config, summary={"data_hash": "def"})
    groups, _ = group_runs(find_runs([tmp_path]))
    assert {group.labels["data"] for group in groups} == {"abc", "def"}


@pytest.mark.parametrize("main", [main, figures_main])
def test_pandas_is_asked_for_in_one_sentence(sweep, monkeypatch, capsys, main):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert main([str(sweep)]) == 2
    said = capsys.readouterr().err
    assert said == "fedbench: tables of runs need pandas: pip install 'fedbench-pfl[report]'\n"


def test_a_metric_against_a_key(tmp_path, capsys):
    """Last values are .65 + height; a run with null under the key is no point of the line."""
    for mu, height in ((0.1, 0.0), (0.5, 0.1), (2.0, 0.2), (None, 0.3)):
        for seed in (0, 1):
            make_run(tmp_path, "pgfed", seed, (0.0, height + 0.02 * seed), config={"algorithm": {"mu": mu}})
    groups, _ = group_runs(find_runs([tmp_path]))
    lines = values_by_key(groups, Options(), "algorithm.mu")
    assert list(lines) == ["PGFed"] and sorted(lines["PGFed"]) == [0.1, 0.5, 2.0]
    np.testing.assert_allclose(sorted(lines["PGFed"][0.5]), [0.75, 0.77])
    with pytest.raises(ConfigError, match=r"--against optimizer.lr needs runs with at least two numbers"):
        values_by_key(groups, Options(), "optimizer.lr")
    pytest.importorskip("matplotlib")
    asked = [str(tmp_path), "--against", "algorithm.mu"]
    assert main(asked) == 2
    assert "--against algorithm.mu draws a figure: add --figures FOLDER" in capsys.readouterr().err
    assert main([*asked, "--figures", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "against_algorithm.mu_personal_accuracy.png").stat().st_size > 10_000


def test_numbers_over_powers_of_ten_are_bars_at_even_distances(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure) or path)
    for value, curve in ((0.0, (0.1, 0.2)), (0.001, (0.1, 0.3)), (10.0, (0.1, 0.4))):
        make_run(tmp_path / f"{value}", "ditto", 0, curve, config={"algorithm": {"lam": value}})
    draw_against(group_runs(find_runs([tmp_path]))[0], Options(), "algorithm.lam", tmp_path / "bars.png")
    bars = drawn[0].axes[0].patches
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx([0, 1, 2])
    assert np.diff([bar.get_height() for bar in bars]) == pytest.approx([10, 10])


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["{empty}"], "no runs found in {empty}"),
        (["{empty}/nowhere"], "{empty}/nowhere is not a folder"),
        (["{sweep}", "--metric", "accuracy"], "the nearest are global/accuracy, personal/accuracy"),
        (["{sweep}", "--metric", "personal/acuracy"], "the nearest are personal/accuracy"),
        (["{sweep}", "--target", "70"], "--target is 70; personal/accuracy is a fraction"),
        (["{sweep}", "--group", "algorithm.muu"], "has no such config key"),
    ],
)
def test_mistakes_get_one_sentence(sweep, tmp_path, capsys, args, sentence):
    (tmp_path / "empty").mkdir()
    places = {"sweep": str(sweep), "empty": str(tmp_path / "empty")}
    assert main([arg.format(**places) for arg in args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedbench: ")
    assert said.count("\n") == 1
    assert sentence.format(**places) in said


def test_command_line_starts_light(sweep):
    """The report needs no torch, and matplotlib for figures only."""
    code = (
        "import sys; from fedbench.report.command import main; main(sys.argv[1:]);"
        "assert not {'torch', 'matplotlib', 'wandb', 'sklearn', 'scipy'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(sweep)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "pgfed" in done.stdout


def test_over_seeds():
    assert over_seeds([0.5]) == Spread(0.5, None, 1, 1)
    assert over_seeds([0.4, None, 0.6]) == Spread(0.5, pytest.approx(0.1), 2, 3)
    assert over_seeds([float("nan")]).count == 0


def test_cells():
    column = Column("x", "x", 1, 100, missing="never")
    assert format_cell(Spread(0.5, 0.01, 2, 3), column) == "50.0 ± 1.0 (2 of 3)"
    assert format_cell(Spread(float("nan"), None, 0, 2), column) == "never"
    assert format_cell(0.125, Column("x", "x", 2)) == "0.12"
    assert format_cell(None, Column("x", "x")) == "-"
    value = 0.1 + 0.2
    table = Table("t", [Column("a", "A", scale=100), Column("b", "B")], [{"a": Spread(value, None, 1), "b": "x,y"}])
    assert read_csv(render([table], "csv")) == [{"a_mean": repr(value), "a_std": "", "a_n": "1", "b": "x,y"}]


@pytest.mark.parametrize("given", ["[]\n", "", "- rounds=3\n"])
def test_a_run_without_overrides_is_reported(sweep, capsys, given):
    """As `python -m fedbench` alone leaves it."""
    bare = make_run(sweep, "ditto", 7)
    (bare / ".hydra").mkdir()
    (bare / ".hydra" / "overrides.yaml").write_text(given)
    assert main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert "damaged" not in said and "Ditto" in said
