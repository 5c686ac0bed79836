"""What is taken out of a run equals what the run measured."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.models.mlp import MLP
from fedbench.tools import export_command
from fedbench.tools.export import client_state, open_run, predictions


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    assert (
        main(
            [
                "algorithm=fedper",
                "rounds=2",
                "tracking=disabled",
                "hardware.executor=vmap",
                "model.hidden=[8]",
                f"output_dir={root}",
            ]
        )
        == 0
    )
    return next(root.glob("*/*/*/summary.json")).parent


def accuracies(run_dir: Path) -> dict[int, float]:
    with open(run_dir / "clients.csv") as file:
        return {int(r["client"]): float(r["personal/accuracy"]) for r in csv.DictReader(file) if r["round"] == "2"}


def test_a_clients_model_in_plain_pytorch_scores_what_the_run_says(run_dir):
    module = MLP((1, 8, 8), 10, [8])
    module.load_state_dict(client_state(run_dir, 7))
    federation = open_run(run_dir).engine.federation
    x, y = federation.gather(torch.from_numpy(federation.splits["test"][7]))
    accuracy = (module(x).argmax(1) == y).float().mean().item()
    assert accuracy == pytest.approx(accuracies(run_dir)[7])


def test_predictions_score_what_the_run_says(run_dir):
    found = predictions(run_dir)
    right = found["logits"].argmax(1) == found["target"]
    measured = np.bincount(found["client"], right) / np.bincount(found["client"])
    assert measured == pytest.approx([accuracies(run_dir)[i] for i in range(20)])


def test_the_command_says_what_it_wrote(run_dir, tmp_path, monkeypatch, capsys):
    """Options and targets in any order; a file's name carries its client."""
    monkeypatch.chdir(tmp_path)
    words = ["--client", "7", "--predictions", "all.npz", "model._target_=fedbench.models.mlp.MLP"]
    assert export_command.main([str(run_dir), *words]) == 0
    saved, out = torch.load("client7.pt"), capsys.readouterr().out
    assert saved.keys() == client_state(run_dir, 7).keys()
    assert f"client7.pt: state_dict of client 7, {sum(t.numel() for t in saved.values()):,} values" in out
    assert re.search(
        r"client7.pt: round 2 of 2, the last that was saved \((the best one, too|the models of round 1)", out
    )
    assert f"all.npz: client, index, target, logits of {len(np.load('all.npz')['target']):,} test samples" in out


def test_the_command_of_a_run_is_in_its_summary_as_typed(run_dir, tmp_path):
    """Its own, not that of the process's first run."""
    assert main(["algorithm=local", "rounds=1", "tracking=disabled", f"output_dir={tmp_path}"]) == 0
    (after,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/*/*/summary.json"))
    assert after["command"] == f"python -m fedbench algorithm=local rounds=1 tracking=disabled output_dir={tmp_path}"
    assert after["started"] <= after["finished"]
    said = json.loads((run_dir / "summary.json").read_text())["command"]
    assert said.startswith("python -m fedbench algorithm=fedper rounds=2 tracking=disabled") and "hydra." not in said


def test_a_client_that_is_not_there_is_one_sentence(run_dir):
    with pytest.raises(ConfigError, match="20 clients"):
        client_state(run_dir, 20)


MINE = """
from torch import nn
from fedbench.algorithms.fedavg import FedAvg

class Net(nn.Sequential):
    def __init__(self, input_shape, num_classes, width: int = 4):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))

class Mine(FedAvg):
    pass
"""
RUN = ["rounds=1", "local.epochs=1", "tracking=disabled", "hardware.executor=vmap", "hydra.run.dir=run"]


def python(*words: str, within: Path, also: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), also]))}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=within, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_classes_of_ones_own_need_no_second_naming(tmp_path: Path) -> None:
    """Where they are in the working directory, or among the options of --config-dir; elsewhere they are asked for."""
    here, there = tmp_path / "here", tmp_path / "there"
    options = there / "options" / "model"
    for folder in (here, there, options):
        folder.mkdir(parents=True, exist_ok=True)
    (here / "mine.py").write_text(MINE)
    (options / "narrow.yaml").write_text("_target_: mine.Net\nwidth: 2\n")
    own = ["algorithm._target_=mine.Mine", "model._target_=mine.Net"]
    assert python("fedbench", *own, *RUN, within=here).returncode == 0
    done = python("fedbench", "export", "run", "--client", "1", within=here)
    assert done.returncode == 0 and (here / "client1.pt").exists(), done.stderr
    for flags, asked in (([], own[1]), ([own[1]], own[0])):
        done = python("fedbench", "export", str(here / "run"), "--client", "1", *flags, within=there, also=str(here))
        assert done.returncode == 2 and f"if you trust it, add {asked}" in done.stderr
    where = ["--config-dir", "options"]
    done = python("fedbench", "model=narrow", *RUN, *where, within=there, also=str(here))
    assert done.returncode == 0, done.stderr
    assert python("fedbench", "export", "run", "--client", "0", within=there, also=str(here)).returncode == 2
    done = python("fedbench", "export", "run", "--client", "0", *where, within=there, also=str(here))
    assert done.returncode == 0 and (there / "client0.pt").exists(), done.stderr
