"""A task of one's own: one Python file beside the command and one YAML, or `task._target_=`; nothing lists it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedbench.commands import main
from fedbench.tasks.scores import DIRECTIONS

FOCAL = """
import torch.nn.functional as F

from fedbench.tasks.classification import Classification


class Focal(Classification):
    # Lin et al., ICCV 2017, equation 4
    def __init__(self, gamma: float = 2.0, **options):
        super().__init__(**options)
        self.gamma = gamma

    def loss(self, logits, y, class_mask=None):
        ce = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.flatten(), reduction="none").view(y.shape)
        return (1 - (-ce).exp()) ** self.gamma * ce
"""
QUANTILE = """
from fedbench.tasks.regression import Regression


class Quantile(Regression):
    def __init__(self, q: float = 0.5, **options):
        super().__init__(**options)
        self.q = q

    def loss(self, logits, y, class_mask=None):
        below = (y.view(logits.shape) - self.mean) / self.std - logits
        return (self.q * below).maximum((self.q - 1) * below).mean(-1)
"""
METRIC = """
import numpy as np

from fedbench.tasks.classification import Classification


class Surprised(Classification):
    higher_is_better = {**Classification.higher_is_better, "surprise": False}

    def scores(self, statistics, offsets, class_mask=None):
        found = super().scores(statistics, offsets, class_mask)
        return {**found, "surprise": 1 - found["accuracy"]}
"""


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty folder, from which modules can be imported; scores declared here are forgotten."""
    known = dict(DIRECTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield
    DIRECTIONS.clear()
    DIRECTIONS.update(known)


def write(module: str, source: str, target: str, **options: Any) -> list[str]:
    """A user's two files; returns the words that choose the task."""
    Path(f"{module}.py").write_text(source)
    Path("mine/task").mkdir(parents=True)
    lines = [f"_target_: {module}.{target}", *(f"{key}: {value}" for key, value in options.items())]
    Path(f"mine/task/{module}.yaml").write_text("\n".join(lines))
    return ["--config-dir", "mine", f"task={module}"]


def ran(*words: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The rows of metrics.csv and the summary of a short run."""
    assert main([*words, "rounds=3", "tracking=disabled", "hydra.run.dir=run", "hardware=cpu"]) == 0
    with open("run/metrics.csv") as file:
        rows = [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(file)]
    return rows, json.loads(Path("run/summary.json").read_text())


def test_a_focal_loss() -> None:
    words = write("own_focal", FOCAL, "Focal", gamma=2.0)
    rows, summary = ran(*words, "dataset=digits")
    assert rows[-1]["personal/accuracy"] > 0.3 and summary["best"]["metric"] == "personal/accuracy"
    assert summary["task"]["primary"] == "accuracy"


def test_a_quantile_regression() -> None:
    words = write("own_quantile", QUANTILE, "Quantile", q=0.9)
    rows, summary = ran(*words, "dataset=synthetic", "dataset.kind=regression", "dataset.num_classes=2", "model=mlp")
    assert summary["best"]["metric"] == "personal/rmse"
    assert summary["best"]["values"]["personal/rmse"] == min(row["personal/rmse"] for row in rows)


def test_a_metric() -> None:
    words = write("own_metric", METRIC, "Surprised", primary="surprise")
    rows, summary = ran(*words, "dataset=digits")
    assert rows[-1]["personal/surprise"] == pytest.approx(1 - rows[-1]["personal/accuracy"])
    assert summary["best"]["metric"] == "personal/surprise"
    assert summary["best"]["values"]["personal/surprise"] == min(row["personal/surprise"] for row in rows)


def test_by_its_class_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_alone.py").write_text(FOCAL)
    rows, _ = ran("dataset=digits", "task._target_=own_alone.Focal", "task.gamma=1")
    assert rows[-1]["personal/accuracy"] > 0.3
    assert main(["task._target_=own_alone.Focal", "task.gama=1"]) == 2
    assert "task.gama is unknown" in capsys.readouterr().err
