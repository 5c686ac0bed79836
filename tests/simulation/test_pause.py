"""checkpoint.pause_after: a run that pauses and goes on has the bytes of an uninterrupted one."""

import json
from pathlib import Path

import pytest

from fedbench.commands import main

OPTIONS = [
    *("dataset=digits", "model.hidden=[8]", "partition.num_clients=6", "clients_per_round=3", "rounds=6"),
    *("local.epochs=1", "local.batch_size=64", "dataset.val_fraction=0.2", "eval.every=2", "hardware.device=cpu"),
    *("hardware.executor=vmap", "tracking=disabled"),
]
TABLES = ("metrics.csv", "clients.csv", "matrices.npz")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES if (folder / name).is_file()}


def status(folder: Path) -> tuple[str, str, int]:
    summary = json.loads((folder / "summary.json").read_text())
    return json.loads((folder / "status.json").read_text())["status"], summary["status"], summary["rounds_done"]


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=pgfed", "stop.patience=9"),
        pytest.param(("algorithm=ditto",), marks=pytest.mark.slow),
        pytest.param(("algorithm=apfl",), marks=pytest.mark.slow),
    ],
)
def test_a_paused_run_goes_on_to_equal_bytes(words: tuple[str, ...], tmp_path: Path) -> None:
    whole, paused = tmp_path / "whole", tmp_path / "paused"
    assert main([*OPTIONS, *words, f"hydra.run.dir={whole}"]) == 0
    for stop, done in ((2, 2), (2, 2), (4, 4)):  # a repeated pause does nothing
        assert main([*OPTIONS, *words, f"hydra.run.dir={paused}", f"checkpoint.pause_after={stop}"]) == 0
        assert status(paused) == ("paused", "paused", done)
    assert main([*OPTIONS, *words, f"hydra.run.dir={paused}"]) == 0
    assert status(paused) == ("finished", "finished", 6)
    assert contents(paused) == contents(whole) and len(contents(whole)) >= 2


def test_resume_ignores_the_pause_of_the_first_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main([*OPTIONS, f"hydra.run.dir={folder}", "checkpoint.pause_after=2"]) == 0
    assert f"paused after round 2 of 6; to go on: python -m fedbench resume={folder}" in capsys.readouterr().out
    assert main([f"resume={folder}", "checkpoint.pause_after=4"]) == 0
    assert status(folder) == ("paused", "paused", 4)
    assert main([f"resume={folder}"]) == 0
    assert status(folder) == ("finished", "finished", 6)


def test_a_pause_after_the_last_round_changes_nothing(tmp_path: Path) -> None:
    assert main([*OPTIONS, f"hydra.run.dir={tmp_path / 'run'}", "checkpoint.pause_after=6"]) == 0
    assert status(tmp_path / "run") == ("finished", "finished", 6)


def test_a_sweep_pauses_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", *OPTIONS, "seed=0,1", f"sweep_dir={tmp_path}"]
    assert main([*sweep, "checkpoint.pause_after=2"]) == 0
    assert "2 runs: 2 paused" in capsys.readouterr().out
    assert main(sweep) == 0
    assert "2 runs: 2 finished" in capsys.readouterr().out
