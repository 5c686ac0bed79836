"""Commands with --json print one object that fits its schema, whatever happens, and nothing else on standard output."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from jsonschema import Draft202012Validator
from schemas import KINDS, schema_of, validated

from fedbench.app.json_result import _scores
from fedbench.commands import main
from fedbench.core.json_output import json_text
from fedbench.report.table import Column, Spread, Table, as_object
from fedbench.site.schemas import SchemaKey, read_schemas

TINY = ["dataset=generated", "partition=iid", "partition.num_clients=4", "rounds=2", "local.epochs=1",
        "hardware.executor=vmap", "tracking=disabled"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_schema_is_valid_and_describes_all_its_keys(kind: str) -> None:
    """The schema is valid, each key has a type and a meaning, and docs/json.md names the kind."""
    Draft202012Validator.check_schema(schema_of(kind))
    schema = next(schema for schema in read_schemas() if schema.kind == kind)
    assert schema.keys[0] == SchemaKey("schema", "string", f"kind and version of the object: `fedbench/{kind}/1`")
    assert all(key.type and key.meaning for key in schema.keys)
    assert f"`{kind}`" in (ROOT / "docs" / "json.md").read_text()


def test_the_keys_of_a_schema_include_those_of_its_lists() -> None:
    keys = {schema.kind: {key.name: key for key in schema.keys} for schema in read_schemas()}
    assert keys["report"]["tables[].columns[].title"] == SchemaKey(
        "tables[].columns[].title", "string", "heading of the column"
    )
    assert keys["tune"]["trials[].seeds"].type == "array of integers"
    assert keys["run"]["last.worst_tenth"].type == "number or null"
    assert keys["error"]["exit_code"].meaning.endswith(". One of `1`, `2`, `130`")
    assert keys["options"]["keys[].bounds.ge"].type == "number"
    assert not any(key.startswith("runs[].") for key in keys["sweep"])  # they are those of a run


def test_the_runs_of_a_sweep_have_the_keys_of_a_run() -> None:
    run = schema_of("run")["properties"]
    run.pop("schema")
    assert schema_of("sweep")["properties"]["runs"]["items"]["properties"] == run


def test_a_run_a_failed_run_and_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "algorithm=fedavg", "dataset.val_fraction=0.2", f"hydra.run.dir={tmp_path / 'a'}", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    run = validated(shown.out, "run")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert "round 2/2" in shown.err
    assert (run["status"], run["algorithm"], run["metric"]) == ("finished", "fedavg", "personal/accuracy")
    assert run["overrides"] == words[:-2] and Path(run["folder"]) == tmp_path / "a"
    assert run["last"]["test"] == summary["last"]["personal/accuracy"]
    assert run["last"]["worst_tenth"] == summary["last"]["personal/accuracy_worst"]
    assert run["best_val"]["round"] == summary["best_val"]["round"]
    assert run["best_val"]["validation"] == summary["best_val"]["values"]["val/accuracy"]
    assert run["cost"]["bytes_up"] == summary["cost"]["bytes_up"] > 0

    assert main(words) == 0
    assert validated(capsys.readouterr().out, "run") == {**run, "status": "finished already"}
    assert main([f"resume={tmp_path / 'a'}", "--json"]) == 0
    assert validated(capsys.readouterr().out, "run") == {**run, "status": "finished already"}

    assert main([*TINY, "optimizer.lr=1e30", f"hydra.run.dir={tmp_path / 'b'}", "--json"]) == 1
    shown = capsys.readouterr()
    failure = validated(shown.out, "error")
    assert failure["exit_code"] == 1 and failure["error"]["type"] == "RunError"
    assert "not finite" in failure["error"]["message"] and failure["error"]["message"] in shown.err

    assert main(["rounds=0", "--json"]) == 2
    failure = validated(capsys.readouterr().out, "error")
    assert failure["error"] == {"type": "ConfigError", "message": "rounds must be a whole number >= 1, got 0"}


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_a_last_score_that_is_no_number_is_null(score: float) -> None:
    """The schema allows null for `last`, and a number for `last.test`."""
    summary = {"last": {"personal/loss": score}}
    assert _scores(summary, "last", "loss", round=2) is None
    scores = _scores({"last": {"personal/loss": 0.5}}, "last", "loss", round=2)
    assert scores is not None and (scores["round"], scores["test"]) == (2, 0.5)


def test_a_paused_run_says_that_it_is_paused_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "algorithm=fedavg", "checkpoint.pause_after=1", f"hydra.run.dir={tmp_path / 'a'}", "--json"]
    assert main(words) == 0
    run = validated(capsys.readouterr().out, "run")
    assert (run["status"], run["rounds_done"], run["rounds"]) == ("paused", 1, 2)
    assert f"resume={tmp_path / 'a'}" in run["message"]


def test_a_sweep_with_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *TINY, "algorithm=fedavg", "optimizer.lr=0.1,1e30", f"sweep_dir={tmp_path}", "--json"]
    assert main(words) == 1
    sweep = validated(capsys.readouterr().out, "sweep")
    assert Path(sweep["folder"]) == tmp_path and sweep["exit_code"] == 1
    finished, failed = sweep["runs"]
    assert (finished["status"], failed["status"]) == ("finished", "failed")
    assert "optimizer.lr=0.1" in finished["overrides"] and "optimizer.lr=1e+30" in failed["overrides"]
    assert math.isfinite(finished["last"]["test"]) and failed["last"] is None
    assert "not finite" in failed["message"] and finished["message"] == ""

    assert main(["report", str(tmp_path), "--json"]) == 0
    report = validated(capsys.readouterr().out, "report")
    (results,) = (table for table in report["tables"] if table["name"] == "results")
    (row,) = results["rows"]
    assert row["method"] == "fedavg" and row["last"]["mean"] == finished["last"]["test"]
    assert row["best_val"] == {"mean": None, "std": None, "n": 0, "total": 1}
    assert row.keys() == {column["key"] for column in results["columns"]}
    assert any("1 run failed before the first round" in note for note in report["notes"])


def test_a_run_beside_json_is_refused_where_it_prints_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--cfg", "job"], ["--info", "defaults"], ["--hydra-help"]):
        assert main([*words, "--json"]) == 2
        assert "remove --json" in validated(capsys.readouterr().out, "error")["error"]["message"]


def test_cells_of_tables() -> None:
    """Means over seeds are objects, numbers are unrounded and unscaled, and a missing cell is null."""
    columns = [Column("method", "method"), Column("last", "last", 2, 100), Column("gone", "gone")]
    rows = [{"method": "a", "last": Spread(1 / 3, None, 1, 2), "other": 1}, {"method": "b", "last": float("nan")}]
    tables = [Table("scores", columns, rows, ["first"], "results"), Table("nothing else", [], notes=["second"])]
    read = validated(json_text("report", {**as_object(tables), "figures": [Path("a.png")]}), "report")
    assert read["notes"] == ["first", "nothing else", "second"] and read["figures"] == ["a.png"]
    (table,) = read["tables"]
    assert table["columns"][1] == {"key": "last", "title": "last"}
    assert table["rows"] == [
        {"method": "a", "last": {"mean": 1 / 3, "std": None, "n": 1, "total": 2}, "gone": None},
        {"method": "b", "last": None, "gone": None},
    ]


def test_papers(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "--json"]) == 0
    (table,) = validated(capsys.readouterr().out, "report")["tables"]
    names = [row["table"] for row in table["rows"]]
    assert table["name"] == "tables" and "pgfed_table1_cifar" in names
    assert main(["paper", "pgfed_table1_cifar", "--json"]) == 0
    paper = validated(capsys.readouterr().out, "report")
    (cells,) = paper["tables"]
    assert cells["name"] == "cells" and len(cells["rows"]) == 84
    assert cells["rows"][0]["printed"]["mean"] == 72.4 and cells["rows"][0]["ours"] is None
    assert any("+experiment=pgfed_table1_cifar/" in note for note in paper["notes"])
    assert main(["report", "--paper", "pgfed_table1_cifar", "--json"]) == 0
    assert validated(capsys.readouterr().out, "report")["tables"] == paper["tables"]
    assert main(["paper", "pgfed_table1_cifar", "--json", "--format", "csv"]) == 2
    assert "leave out one" in validated(capsys.readouterr().out, "error")["error"]["message"]
    assert main(["paper", "--json", "--out", "table.tex"]) == 2
    assert "must end in .json" in validated(capsys.readouterr().out, "error")["error"]["message"]
    assert main(["paper", "--json", "--out", "table.json"]) == 0
    assert validated(Path("table.json").read_text(), "report")["tables"] == [table]
    assert capsys.readouterr().out == ""


def test_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["partition", "partition.num_clients=6", "dataset.val_fraction=0.2", "--out", str(tmp_path / "p.npz")]
    assert main([*words, "--json"]) == 0
    read = validated(capsys.readouterr().out, "partition")
    stored = np.load(tmp_path / "p.npz", allow_pickle=False)
    for name in ("train", "val", "test"):
        sizes = np.diff(stored[f"{name}_offsets"])
        assert [client[name] for client in read["clients"]] == sizes.tolist()
    totals = [sum(client[name] for name in ("train", "extra", "val", "test")) for client in read["clients"]]
    assert totals == [sum(client["label_counts"]) for client in read["clients"]]
    assert read["samples"] == sum(totals) == 1797 and read["left_out"] == 0
    assert [client["name"] for client in read["clients"]] == list("012345")


def test_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "partition=iid", "--only", "a_seed_repeats,every_sample_once", "--json"]) == 0
    check = validated(capsys.readouterr().out, "check")
    assert [outcome["name"] for outcome in check["checks"]] == ["a_seed_repeats", "every_sample_once"]
    assert check["ok"] and check["passed"] == 2 and check["kind"] == "partition"
    assert main(["check", "--list", "--json"]) == 0
    checks = validated(capsys.readouterr().out, "checks")["checks"]
    assert check["checks"][0]["description"] in {c["description"] for c in checks if c["kind"] == "partition"}
    assert main(["check", "no_package.NoClass", "--json"]) == 2
    assert "no_package" in validated(capsys.readouterr().out, "error")["error"]["message"]
