"""Early stopping: when a run stops, what it returns to, and that resuming changes nothing."""

import csv
import json
import logging
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.simulation import checkpoint
from fedbench.simulation.early_stopping import EarlyStopping
from fedbench.simulation.simulator import run

OPTIONS = [
    *("algorithm=ditto", "model.hidden=[8]", "partition.num_clients=6", "partition.alpha=1", "clients_per_round=3"),
    *("local.epochs=1", "local.batch_size=64", "dataset.val_fraction=0.2", "tracking=disabled", "hardware.device=cpu"),
    *("hardware.executor=vmap", "checkpoint.every=1", "rounds=40", "stop.patience=2", "optimizer.lr=1.0"),
    *("optimizer.momentum=0.9", "optimizer.reset=never"),
]


def run_in(folder: Path, *overrides: str, resume: bool = False) -> dict:
    folder.mkdir(exist_ok=True)
    return run(config(*overrides), folder, resume=resume)


def config(*overrides: str) -> DictConfig:
    return compose([*OPTIONS, *overrides])


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def personal(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if name.startswith(("personal/", "global/", "val/"))}


@pytest.mark.parametrize(
    "round, best, every, due", [(5, 5, 1, False), (6, 5, 1, False), (7, 5, 1, True), (9, 6, 3, False), (12, 6, 3, True)]
)
def test_patience_counts_evaluations(round: int, best: int, every: int, due: bool) -> None:
    assert EarlyStopping(2).is_due(round, best, every) is due


@pytest.mark.parametrize(
    "words", [(), ("compression=topk", "compression.share=0.3", "server=momentum", "algorithm=fedavg")]
)
def test_a_run_stops_and_returns_to_its_best_round(words: tuple[str, ...], tmp_path: Path) -> None:
    """The last line has the scores of the best round, and the checkpoint has its models."""
    summary = run_in(tmp_path, *words)
    rows, best = metrics(tmp_path), summary["best_val"]["round"]
    stopped = summary["stopped_early"]
    assert summary["status"] == "finished" and stopped == summary["rounds_done"] == len(rows) < 40
    assert best == stopped - 2
    assert personal(rows[-1]) == personal(rows[best - 1]) != personal(rows[-2])
    scores = [float(row["val/accuracy"]) for row in rows[:-1]]
    assert max(scores) == scores[best - 1]


def test_patience_beyond_the_rounds_changes_the_last_line_only(tmp_path: Path) -> None:
    """A run of so few rounds does not stop early, but it ends with its best round as well."""
    first = run_in(tmp_path / "stopped", "rounds=40")
    rounds = first["stopped_early"]
    run_in(tmp_path / "whole", f"rounds={rounds}", "stop.patience=100")
    whole, stopped = metrics(tmp_path / "whole"), metrics(tmp_path / "stopped")
    assert whole == stopped
    plain = run_in(tmp_path / "plain", f"rounds={rounds}", "stop.patience=null")
    assert metrics(tmp_path / "plain")[:-1] == stopped[:-1] and "stopped_early" not in plain
    assert metrics(tmp_path / "plain")[-1] != stopped[-1]


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_resumes_writes_the_same_bytes(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle, or after a round that was not the best."""
    summary = run_in(tmp_path / "whole")
    killed_in = max(summary["stopped_early"] - after, 1)
    real = checkpoint.save

    def save_and_die(folder: Path, state: dict, *rest: object) -> None:
        real(folder, state, *rest)  # type: ignore[arg-type]
        if state["round"] == killed_in:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run_in(tmp_path / "killed")
    run_in(tmp_path / "killed", resume=True)
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ends = [checkpoint.load(tmp_path / name) for name in ("whole", "killed")]
    assert all(torch.equal(ends[0]["algorithm"][name], ends[1]["algorithm"][name]) for name in ends[0]["algorithm"])


def test_a_stopped_run_does_not_go_on(tmp_path: Path) -> None:
    summary = run_in(tmp_path)
    before = (tmp_path / "metrics.csv").read_bytes()
    again = run_in(tmp_path, resume=True)
    assert again["rounds_done"] == summary["rounds_done"] and (tmp_path / "metrics.csv").read_bytes() == before


def test_the_log_says_why_and_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        summary = run_in(tmp_path)
    assert f"ends with the model of round {summary['best_val']['round']}" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_early"] == summary["stopped_early"]


def test_validation_samples_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop\.patience=2 needs validation samples"):
        run_in(tmp_path, "dataset.val_fraction=0")
