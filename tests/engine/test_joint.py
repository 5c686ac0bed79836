"""Runs that meet at the gradient: each gets the rows that it gets alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modules import MODELS
from tiny import close, compose, deployed, engine, mlp, play, ragged, seeded
from torch import nn

from fedbench.algorithms.apple import APPLE
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedprox import FedProx
from fedbench.algorithms.fedrod import FedRoD
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pgfed import PGFed
from fedbench.core.options import ConfigError
from fedbench.engine import joint
from fedbench.engine.cuda_graphs import GraphedGradients
from fedbench.engine.joint import JointRuns
from fedbench.engine.optim import SGD
from fedbench.simulation import build
from fedbench.tasks.base import Task
from fedbench.tasks.classification import Classification

Method = Callable[[], Algorithm]


def a_run(
    seed: int,
    make: Callable[[], nn.Module],
    method: Method,
    shape: tuple = (1, 4, 4),
    meeting: JointRuns | None = None,
    kin: object = "alike",
    lr: float = 0.1,
    task: Task | None = None,
) -> np.ndarray:
    """Three rounds of a method from a start and cohorts of its own: what its clients deploy."""
    arrays, split = ragged(shape=shape, seed=seed)
    e = engine(
        arrays,
        split,
        seeded(make, seed),
        SGD(lr=lr, momentum=0.9),
        seed=seed,
        columns={"head": ["head.*"]} if make is mlp else None,
    )
    if task is not None:
        e.federation.task = task
        task.setup(e.federation)
    if meeting is not None:
        e.executor.gradients = meeting.gradients(e.executor.gradients, kin)
    algorithm = play(e, method(), 3, [[0, 2, 3, 5], [1, 2, 4], list(range(6 - seed))])
    rows = deployed(e, algorithm)
    return rows["theta"].numpy() if isinstance(rows, dict) else rows.numpy()


def compare(runs: list[dict]) -> JointRuns:
    """Every run in a meeting against the same run alone."""
    meeting = JointRuns(8)
    found = meeting.run([lambda run=run: a_run(**run, meeting=meeting) for run in runs])
    for run, rows in zip(runs, found):
        close(rows, a_run(**run), 5e-5)
    return meeting


@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("batch norm", "own statistic")])
def test_seeds_give_the_rows_of_separate_runs(model: str) -> None:
    meeting = compare(
        [{"seed": s, "make": MODELS[model][0], "method": FedAvg, "shape": MODELS[model][1]} for s in range(3)]
    )
    assert meeting.joint[1] > 2 * meeting.joint[0] > 0, "nothing was computed together: the test compares nothing"


def test_dropout_is_each_runs_own() -> None:
    def drop() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    assert compare([{"seed": s, "make": drop, "method": FedAvg} for s in range(2)]).joint[0]


@pytest.mark.parametrize("method", [PGFed, Ditto, lambda: APPLE(init="common"), PerFedAvg])
def test_seeds_of_methods(method: Method) -> None:
    assert compare([{"seed": s, "make": mlp, "method": method} for s in range(2)]).joint[0]


def test_hyperparameters_and_methods_may_differ() -> None:
    meeting = compare(
        [
            {"seed": 0, "make": mlp, "method": lambda: PGFed(mu=0.5)},
            {"seed": 0, "make": mlp, "method": PGFed},
            {"seed": 1, "make": mlp, "method": lambda: FedProx(mu=0.1), "lr": 0.01},
            {"seed": 0, "make": mlp, "method": FedRoD},
        ]
    )  # FedRoD's loss is its own: it computes alone
    assert meeting.joint[0]


def test_tapped_models_are_computed_alone() -> None:
    """A tap is the run's own code: what it changes is not changed in the others."""

    class Tapping(FedAvg):
        def setup(self, *args: Any) -> None:
            super().setup(*args)
            args[1].tap("body", lambda y, row: 2 * y)

    compare([{"seed": s, "make": mlp, "method": m} for s, m in ((0, FedAvg), (0, Tapping), (1, FedAvg))])


def test_adapters_of_other_options_are_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha is a plain number in a layer, in no row and no constant."""
    kinds: list[Any] = []

    class Meeting(JointRuns):
        def gradients(self, alone: Any, model_kind: Any) -> Any:
            kinds.append(model_kind)
            return alone

    monkeypatch.setattr(joint, "_current", Meeting(2))
    for alpha in (8, 16, 8):
        change = ["model=vit_tiny", "model.patch=4", "adapter=lora", f"adapter.alpha={alpha}"]
        cfg = compose([*change, "hardware.executor=vmap"])
        arrays = build.load(cfg)
        build.engine(cfg, arrays, build.partition(cfg, arrays))
    assert kinds[0] == kinds[2] != kinds[1]


def test_each_run_has_the_loss_of_its_own_task() -> None:
    """Two runs without label smoothing are computed together; what differs in the task's options is not."""
    tasks = [Classification(), Classification(label_smoothing=0.1), Classification(), Classification("balanced")]
    runs = [{"seed": s, "make": mlp, "method": FedAvg, "task": task} for s, task in enumerate(tasks)]
    assert compare(runs).joint[0]


def test_answers_that_are_overwritten_are_copied() -> None:
    """Recordings leave every gradient in one place: a run that asks twice in a step keeps its first."""
    found = []
    for graphs in (True, False):
        meeting = JointRuns(2)

        def job(seed: int, method: Method, graphs: bool = graphs, meeting: JointRuns = meeting) -> np.ndarray:
            arrays, split = ragged()
            e = engine(arrays, split, seeded(mlp), SGD(lr=0.1), seed=seed)
            alone = GraphedGradients(lambda work: work) if graphs else e.executor.gradients
            e.executor.gradients = meeting.gradients(alone, "alike")
            return deployed(e, play(e, method(), 2)).numpy()

        found.append(meeting.run([lambda: job(0, FedAvg), lambda: job(1, lambda: PerFedAvg(mode="hf"))]))
        assert meeting.joint[0]
    close(found[0][0], found[1][0], 5e-5)
    close(found[0][1], found[1][1], 5e-5)


def test_batch_statistics_are_computed_alone() -> None:
    make, shape = MODELS["batch norm"]
    assert not compare([{"seed": s, "make": make, "method": FedAvg, "shape": shape} for s in range(2)]).joint[0]


def test_models_that_are_no_kin_stay_apart() -> None:
    assert not compare([{"seed": 0, "make": mlp, "method": FedAvg, "kin": i} for i in range(2)]).joint[0]


# -- the meeting itself ----------------------------------------------------------------------------------
def test_so_many_at_once_and_results_in_order() -> None:
    meeting, most = JointRuns(2), []

    def job(seed: int) -> float:
        most.append(len(meeting.live))
        return a_run(seed, mlp, FedAvg, meeting=meeting).sum()

    found = meeting.run([lambda s=s: job(s) for s in range(4)])
    assert max(most) == 2
    close(np.array(found), np.array([a_run(s, mlp, FedAvg).sum() for s in range(4)]), 1e-3)


def test_a_failure_is_raised_when_the_others_have_ended() -> None:
    meeting, ended = JointRuns(3), []

    def fails() -> None:
        raise ConfigError("no")

    def works(seed: int) -> None:
        a_run(seed, mlp, FedAvg, meeting=meeting)
        ended.append(seed)

    with pytest.raises(ConfigError, match="no"):
        meeting.run([lambda: works(0), fails, lambda: works(1)])
    assert sorted(ended) == [0, 1] and joint.current() is None


def test_too_little_memory_for_all_is_enough_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "joined", lambda asks: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
    assert not compare([{"seed": s, "make": mlp, "method": FedAvg} for s in range(2)]).joint[0]


def test_an_interruption_reaches_runs_that_wait() -> None:
    meeting, told = JointRuns(3), []

    def waits(seed: int) -> None:
        try:
            a_run(seed, mlp, FedAvg, meeting=meeting)
        except KeyboardInterrupt:
            told.append(seed)
            raise

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meeting.run([lambda: waits(0), lambda: waits(1), interrupted, lambda: told.append("started")])
    assert told == [0, 1]


def test_gradients_are_recorded_or_not_as_each_run_left_it() -> None:
    """Which is global in a thread, and runs wait within torch.no_grad."""
    meeting, seen = JointRuns(2), []

    def job(seed: int) -> None:
        seen.append(torch.is_grad_enabled())
        a_run(seed, mlp, FedAvg, meeting=meeting)
        seen.append(torch.is_grad_enabled())

    meeting.run([lambda: job(0), lambda: job(1)])
    assert seen == [True] * 4 and torch.is_grad_enabled()


def test_what_is_shared_is_made_once() -> None:
    made: list[int] = []

    def job(number: int = 0) -> int:
        return joint.load_once(("key", number), lambda: made.append(1) or len(made))

    assert JointRuns(2).run([job, job]) == [1, 1]
    assert (job(), job()) == (2, 3)  # nobody to share with
    meeting = JointRuns(1)
    found = meeting.run([lambda n=n: job(n) for n in (0, 1, 2, 3, 3, 4, 4, 1, 0)])
    assert found == [4, 5, 6, 7, 7, 8, 8, 5, 9] and len(meeting.loaded) == joint.KEPT


# -- on the command line ---------------------------------------------------------------------------------
COMMAND = (
    sys.executable,
    "-m",
    "fedbench",
    "-m",
    "algorithm=fedavg,pgfed",
    "seed=0,1",
    "hardware=cpu",
    "hardware.executor=vmap",
    "tracking=disabled",
)


@pytest.mark.slow
def test_a_sweep_gives_the_same_files(tmp_path: Path) -> None:
    texts = []
    for name in ("basic", "together"):
        command = [*COMMAND, "rounds=3", f"sweep_dir={name}", f"hydra/launcher={name}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "4 cells: 4 finished" in done.stdout
        cells = sorted((tmp_path / name).glob("*/metrics.csv"))
        texts.append(
            {
                c.parent.name: [[float(v) for v in line.split(",")] for line in c.read_text().split("\n")[1:-1]]
                for c in cells
            }
        )
    assert texts[0].keys() == texts[1].keys() and len(texts[0]) == 4
    for name, numbers in texts[0].items():
        close(np.array(texts[1][name]), np.array(numbers), 1e-4)
    for log in (tmp_path / "together").glob("*/run.log"):
        assert log.read_text().count("numbers a row") == 1, "a run's log holds its own lines, once"
    assert re.search(r"algorithm=pgfed,rounds=3,seed=1 +round 3/3", done.stdout)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.stdout.count("finished already") >= 4


@pytest.mark.slow
def test_one_signal_stops_all_after_their_round(tmp_path: Path) -> None:
    """And the same command goes on with every one of them."""
    command = [*COMMAND, "rounds=100000", "sweep_dir=s", "hydra/launcher=together"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while time.monotonic() < until and len(list(tmp_path.glob("s/*/costs.csv"))) < 4:
        time.sleep(0.2)
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "stopping all runs" in out and "4 interrupted" in out
    for folder in tmp_path.glob("s/*/"):
        if folder.is_dir():
            assert (folder / "checkpoint.pt").is_file()
            assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"
