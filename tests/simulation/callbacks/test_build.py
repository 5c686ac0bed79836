"""Callbacks are called in a fixed order, cannot end a run, and survive a resume."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import DictConfig
from tiny import compose

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash
from fedbench.simulation import checkpoint
from fedbench.simulation.callbacks.base import Callback
from fedbench.simulation.callbacks.build import build
from fedbench.simulation.simulator import run

OPTIONS = [
    *("algorithm=fedavg", "model=logistic", "partition=iid", "partition.num_clients=4", "rounds=3"),
    *("clients_per_round=2", "local.epochs=1", "local.batch_size=64", "hardware.device=cpu"),
    *("hardware.executor=vmap", "tracking=disabled", "checkpoint.every=1"),
]
TABLES = ("metrics.csv", "clients.csv")


class Noting(Callback):
    """Notes its hooks.  fail: the hook that raises; stop: the round in which the run is interrupted."""

    def __init__(self, fail: str = "", stop: int = 0):
        self.fail, self.stop = fail, stop
        self.calls: list[str] = []

    def note(self, hook: str) -> None:
        self.calls.append(hook)
        CALLS.append(hook)
        if hook == self.fail:
            raise RuntimeError("the callback's own mistake")

    def on_start(self, run: Any, saved: Any) -> None:
        self.calls = saved or []
        self.note("start")

    def on_evaluation(self, run: Any, metrics: Any, clients: Any) -> None:
        assert (run.run_dir / "clients.csv").stat().st_size
        self.note("evaluation")

    def on_round_end(self, run: Any, costs: Any) -> None:
        self.note("round")
        if run.done == self.stop:
            raise KeyboardInterrupt

    def on_checkpoint(self, run: Any) -> Any:
        self.note("checkpoint")
        return object() if self.fail == "pickle" else self.calls

    def on_end(self, run: Any, status: str, summary: Any) -> None:
        self.note(status)


CALLS: list[str] = []
ROUND = ["evaluation", "round", "checkpoint"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_notes")
    module.Noting = Noting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_notes", module)
    CALLS.clear()


def config(*overrides: str) -> DictConfig:
    return compose([*OPTIONS, *overrides])


def noting(**options: Any) -> list[str]:
    """Hydra's words for the callback."""
    words = [f"++callbacks.mine.{name}={value}" for name, value in options.items()]
    return ["++callbacks.mine._target_=my_notes.Noting", *words]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(config(), folder)
    return folder


def same(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in TABLES)


def test_the_checkpoint_comes_last_and_progress_can_be_left_out() -> None:
    cfg = config(*noting(), "callbacks=tensorboard")
    names = [type(callback).__name__ for callback in build(cfg)]
    assert names == ["Matrices", "Tables", "Progress", "Wandb", "Guarded", "Guarded", "Checkpoint"]
    assert "Progress" not in [type(callback).__name__ for callback in build(cfg, "warnings")]


def test_hooks_are_called_in_order(tmp_path: Path, whole: Path) -> None:
    run(config(*noting()), tmp_path)
    assert ["start", *ROUND * 3, "finished"] == CALLS
    assert same(tmp_path, whole)


def test_quiet_runs_show_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config("rounds=1"), tmp_path, output="warnings")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("fail", ["evaluation", "round", "checkpoint", "finished", "pickle"])
def test_a_callback_that_fails_is_left_out(
    fail: str, tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedbench"):
        run(config(*noting(fail=fail)), tmp_path)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert re.match(r"callbacks\.mine failed in on_\w+ \(.*\); the run continues without it", warning)
    assert CALLS.count("finished") == (fail == "finished")  # not called again after it failed
    assert same(tmp_path, whole)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert checkpoint.load(tmp_path)["round"] == 3


def test_a_callback_that_cannot_start_ends_the_run_before_its_first_round(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="own mistake"):
        run(config(*noting(fail="start")), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("failed", 0)
    assert CALLS == ["start"]


def test_an_interrupted_run_goes_on_with_the_state_of_its_callback(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(*noting(stop=2)), tmp_path)
    assert ["start", *ROUND, "evaluation", "round", "interrupted"] == CALLS  # before the second checkpoint
    CALLS.clear()
    run(config(*noting()), tmp_path, resume=True)
    assert ["start", *ROUND * 2, "finished"] == CALLS
    state = checkpoint.load(tmp_path)["callbacks.mine"]
    assert json.loads(state) == ["start", *ROUND, "start", *ROUND * 2]
    assert same(tmp_path, whole)


def test_a_run_goes_on_with_other_callbacks(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the command names replace the run's; callbacks are no part of the hash."""
    monkeypatch.chdir(tmp_path)
    assert config_hash(config(*noting())) == config_hash(config())
    folder = tmp_path / "run"
    words = [*OPTIONS, f"hydra.run.dir={folder}"]
    assert main([*words, "callbacks.mine._target_=my_notes.Noting", "callbacks.mine.stop=2"]) == 130
    CALLS.clear()
    assert main([f"resume={folder}", "callbacks=tensorboard"]) == 0
    assert not CALLS and list(folder.glob("tensorboard/events*"))
    assert same(folder, whole)


def test_a_run_goes_on_with_its_callbacks(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stop = main([*OPTIONS, "hydra.run.dir=run", "callbacks=tensorboard", *noting(stop=2)])
    assert stop == 130 and len(list(Path("run/tensorboard").iterdir())) == 1
    assert main(["resume=run"]) == 2  # a class that conf does not name must be named again
    assert main(["resume=run", "callbacks=none"]) == 0
    assert len(list(Path("run/tensorboard").iterdir())) == 1 and same(Path("run"), whole)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted, *a: None if wanted == name else real(wanted, *a))
    monkeypatch.chdir(tmp_path)
    for words in (["hydra.run.dir=run"], ["-m", "seed=0,1"]):
        assert main([*OPTIONS, f"callbacks={name}", *words]) == 2
        assert f"callbacks={name} needs the package {name}: pip install {name}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_callback_that_cannot_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*OPTIONS, "callbacks=mlflow", "callbacks.mlflow.uri=gopher://nowhere"]
    assert main([*words, "hydra.run.dir=run"]) == 2
    assert not list(tmp_path.iterdir())


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.mine\._target_=.*makes an object of type SGD, expected"):
        run(config("++callbacks.mine._target_=fedbench.engine.optim.SGD", "++callbacks.mine.lr=0.1"), tmp_path)


@pytest.mark.slow
def test_a_killed_run_with_every_callback_goes_on_to_the_same_bytes(tmp_path: Path, whole: Path) -> None:
    """kill -9 before the second checkpoint, with TensorBoard, MLflow and W&B offline."""
    driver = """
import os, signal, sys
from fedbench.simulation import checkpoint
from fedbench.commands import main
real, saved = checkpoint.save, []
def save(*args):
    saved.append(1)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)
checkpoint.save = save
sys.exit(main(sys.argv[1:]))
"""
    words = [*(word for word in OPTIONS if not word.startswith("tracking")), "tracking=offline"]
    words += ["callbacks=[tensorboard,mlflow]", f"output_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run"]
    killed = subprocess.run([sys.executable, "-c", driver, *words], cwd=ROOT, env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert main([f"resume={tmp_path}/run"]) == 0
    assert same(tmp_path / "run", whole)
    assert len(list(tmp_path.glob("run/tensorboard/events*"))) == 2
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/personal/accuracy")
    assert [line.split()[2] for line in metric.read_text().splitlines()] == ["1", "2", "2", "3"]
    assert list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))
