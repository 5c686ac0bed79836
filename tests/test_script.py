"""A script that reads only JSON: it adds a method, checks, tunes and runs it, and compares it with another."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from schemas import validated
from test_docs import files

from fedbench.commands import main

RECIPE = ("my_methods.py", "conf/algorithm/server_momentum.yaml")
SMALL = ["rounds=8", "partition.num_clients=6", "dataset.val_fraction=0.2", "hardware.executor=vmap",
         "tracking=disabled"]  # fmt: skip
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """Run a command with --json in an empty folder; return the object of its standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def command(kind: str, *words: str, status: int = 0) -> dict[str, Any]:
        assert main([*words, "--json"]) == status
        return validated(capsys.readouterr().out, kind)

    yield command
    sys.modules.pop("my_methods", None)


def test_a_script_adds_a_method_and_picks_the_better_one(ask: Ask) -> None:
    shown = files((ROOT / "docs" / "own_methods.md").read_text())
    for path in RECIPE:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(shown[path])

    check = ask("check", "check", "my_methods.ServerMomentum", "--only", "resume,executor_loop")
    assert check["ok"] and [outcome["status"] for outcome in check["checks"]] == ["passed", "passed"]

    keys = ask("options", "options", "algorithm=server_momentum", "--config-dir", "conf")["keys"]
    (beta,) = (key for key in keys if key["key"] == "algorithm.beta")
    assert beta["bounds"] == {"ge": 0, "lt": 1}
    too_large = ["algorithm=server_momentum", f"algorithm.beta={beta['bounds']['lt']}", "--config-dir", "conf"]
    assert "algorithm.beta must be a number in [0, 1)" in ask("error", *too_large, status=2)["error"]["message"]

    words = ["algorithm=server_momentum", "algorithm.beta=0.1,0.9", "optimizer.lr=0.05", "seed=0", *SMALL]
    search = ["--search", "grid", "--trials", "2", "--test-seeds", "none", "--config-dir", "conf"]
    tuned = ask("tune", "tune", *words, "sweep_dir=tuned", *search)
    best = max(tuned["trials"], key=lambda trial: trial["score"])
    (chosen,) = tuned["tables"][0]["rows"]
    assert best["overrides"] == [chosen["chosen"]]

    methods = ["algorithm=fedavg,server_momentum", "seed=0,1"]
    sweep = ask("sweep", "-m", *methods, *SMALL, "--config-dir", "conf")
    assert [run["status"] for run in sweep["runs"]] == ["finished"] * 4

    report = ask("report", "report", sweep["folder"], "--select", "best_val", "--config-dir", "conf")
    (results,) = (table for table in report["tables"] if table["name"] == "results")
    by_method = {row["method"]: row["best_val"] for row in results["rows"]}
    better = max(by_method, key=lambda method: by_method[method]["mean"])
    assert better == "server_momentum" and by_method[better]["n"] == 2
    for method, score in by_method.items():
        runs = [run for run in sweep["runs"] if run["algorithm"] == method]
        assert score["mean"] == pytest.approx(sum(run["best_val"]["test"] for run in runs) / len(runs))

    compared = ask(
        "report", "report", sweep["folder"], "--compare", "server_momentum", "fedavg", "--config-dir", "conf"
    )
    (difference,) = next(table["rows"] for table in compared["tables"] if table["name"] == "differences")
    assert (difference["method"], difference["against"], difference["n"]) == ("server_momentum", "fedavg", 2)
    last = {row["method"]: row["last"]["mean"] for row in results["rows"]}
    assert difference["difference"]["mean"] == pytest.approx(last["server_momentum"] - last["fedavg"])
    assert difference["p"] is None  # two seeds are too few for a test
