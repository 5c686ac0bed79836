"""Folders of an older version: killed runs resume, finished ones stay finished, and reports read them.

tests/runs_of_0_1/README.md says how they were made.
"""

import csv
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT

from fedbench.commands import main
from fedbench.core.files import read_json

OLD = ROOT / "tests" / "runs_of_0_1"
KILLED = sorted(path.name for path in OLD.glob("runs/*_killed"))
SMALL = [
    "dataset.subset=0.1",
    "partition.num_clients=4",
    "sample_rate=0.75",
    "rounds=4",
    "local.epochs=1",
    "checkpoint.every=1",
    "tracking=disabled",
    "hardware.device=cpu",
]
SWEEPS = {
    "killed": ["algorithm=fedavg,pgfed", "model.hidden=[2]", *SMALL, "hardware.executor=vmap"],
    "private": [
        "algorithm=fedper",
        "model.hidden=[2]",
        *SMALL,
        "adapter=bias",
        "privacy.epsilon=10",
        "privacy.calibration=analytic",
        "finetune.epochs=1",
    ],
}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the folders, go there, and keep Hydra's log handlers out of the next test."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path
    root.handlers[:] = handlers
    root.setLevel(level)


def words_of(run: Path) -> list[str]:
    """Return the overrides that a run was given."""
    return yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())


def same_tables(run: Path, whole: Path, stored: Path) -> None:
    """Compare a resumed run with an uninterrupted one: bytes, where this machine rounds as the one of the folders.

    Where the stored rounds differ in their last digits from those of `whole`, numbers are compared.
    """
    costs = (stored / "costs.csv").read_text()
    assert len(costs.splitlines()) == 3 and (run / "costs.csv").read_text().startswith(costs)  # not computed again
    for name in ("metrics.csv", "clients.csv"):
        resumed, expected = ((folder / name).read_text().splitlines() for folder in (run, whole))
        before = (stored / name).read_text().splitlines()[:-1]  # the last line may be half written
        assert len(resumed) == len(expected) > len(before) > 1
        if before == expected[: len(before)]:
            assert resumed == expected
        values = [[list(map(float, row)) for row in list(csv.reader(lines))[1:]] for lines in (resumed, expected)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_resumes_to_an_uninterrupted_one(name: str, old: Path) -> None:
    run, stored = old / "runs" / name, OLD / "runs" / name
    assert read_json(run / "summary.json")["status"] == "running"
    assert main([f"resume=runs/{name}"]) == 0
    assert main([*words_of(stored), "hydra.run.dir=whole"]) == 0
    same_tables(run, old / "whole", stored)
    resumed, whole = (read_json(folder / "summary.json") for folder in (run, old / "whole"))
    assert resumed["status"] == "finished"
    for key in ("config_hash", "partition_hash", "data_hash"):
        assert resumed[key] == whole[key] == read_json(stored / "summary.json")[key], key


def test_a_finished_run_is_not_run_again(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (old / "runs" / "fedavg" / "checkpoint.pt").stat()
    assert main(["resume=runs/fedavg"]) == 0
    assert main([*words_of(OLD / "runs" / "fedavg"), "hydra.run.dir=runs/fedavg"]) == 0
    assert capsys.readouterr().out.count("finished already") == 2
    assert (old / "runs" / "fedavg" / "checkpoint.pt").stat() == before


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_goes_on_where_it_was_killed(name: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished cells are found by their folder's name and configuration; the killed one is resumed."""
    sweep = f"sweeps/{name}"
    cells = {path.name: path for path in (OLD / sweep).iterdir() if path.is_dir()}
    finished = {cell for cell, path in cells.items() if read_json(path / "summary.json")["status"] == "finished"}
    times = {cell: (old / sweep / cell / "checkpoint.pt").stat().st_mtime_ns for cell in finished}
    assert main(["-m", *SWEEPS[name], f"sweep_dir={sweep}"]) == 0
    assert finished and "finished already" in capsys.readouterr().out
    assert {path.name for path in (old / sweep).iterdir() if path.is_dir()} == set(cells)
    assert times == {cell: (old / sweep / cell / "checkpoint.pt").stat().st_mtime_ns for cell in finished}
    for cell in set(cells) - finished:
        assert main([*words_of(cells[cell]), "hydra.run.dir=whole"]) == 0
        same_tables(old / sweep / cell, old / "whole", cells[cell])


def test_a_cell_of_a_launcher_that_is_gone_resumes_and_is_reported(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stored folder names its launcher, which nothing reads."""
    sweep = old / "sweeps" / "killed"
    for stored in (sweep / "multirun.yaml", *sweep.glob("*/.hydra/hydra.yaml")):
        text = stored.read_text()
        gone = text.replace(
            "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
            "hydra_plugins.fedbench_together.launcher.Together\n    at_once: 8",
        ).replace("hydra/launcher: basic", "hydra/launcher: together")
        assert gone.count("ogether") == 3
        stored.write_text(gone)
    killed = next(path for path in sweep.glob("*pgfed*"))
    assert main([f"resume={killed}"]) == 0
    assert main(["report", "sweeps/killed"]) == 0
    assert "PGFed" in capsys.readouterr().out
    assert main(["-m", *SWEEPS["killed"], "sweep_dir=sweeps/killed"]) == 0
    assert "2 runs: 2 finished already" in capsys.readouterr().out


def test_old_runs_are_reported(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs", "sweeps", "--group", "algorithm,model"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("FedAvg", "23.51", "FedPer", "18.84", "not finished"))
    assert all(f"resume=runs/{name}" in printed for name in KILLED)
