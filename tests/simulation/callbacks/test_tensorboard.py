"""TensorBoard's event files have the numbers of the tables."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import compose

from fedbench.simulation.callbacks.tensorboard import TensorBoard
from fedbench.simulation.simulator import run


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_a_run_is_in_its_event_file(tmp_path: Path) -> None:
    options = ["algorithm=fedavg", "model=logistic", "partition.num_clients=4", "rounds=2", "local.epochs=1"]
    run(compose([*options, "tracking=disabled", "callbacks=tensorboard", "hardware.executor=vmap"]), tmp_path)
    found = events(tmp_path / "tensorboard")
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = [(event.step, event.value) for event in found.Scalars("personal/accuracy")]
    assert scores == [(int(row["round"]), pytest.approx(float(row["personal/accuracy"]))) for row in rows]
    assert [event.step for event in found.Scalars("cost/bytes_up")] == [1, 2]


def played(run_dir: Path, done: int, upto: int, **options: Any) -> None:
    """Rounds without training."""
    at = SimpleNamespace(run_dir=run_dir, done=done)
    callback = TensorBoard(**options)
    callback.on_start(at, None)  # type: ignore[arg-type]
    for at.done in range(done + 1, upto + 1):
        clients = {"client": np.arange(2), "personal/accuracy": np.array([0.5, np.nan])}
        callback.on_evaluation(at, {"personal/accuracy": at.done / 10}, clients)  # type: ignore[arg-type]
    callback.on_end(at, "finished", {})  # type: ignore[arg-type]


def test_rounds_after_the_checkpoint_are_hidden(tmp_path: Path) -> None:
    """A run that was killed after round 5 resumes from round 3."""
    played(tmp_path, 0, 5)
    time.sleep(1)  # the names of event files begin with the second
    played(tmp_path, 3, 6)
    assert [event.step for event in events(tmp_path / "tensorboard").Scalars("personal/accuracy")] == [1, 2, 3, 4, 5, 6]


def test_histograms_are_over_the_defined_scores(tmp_path: Path) -> None:
    played(tmp_path, 0, 1, folder="elsewhere", histograms=True)
    (event,) = events(tmp_path / "elsewhere").Histograms("clients/personal/accuracy")
    assert event.histogram_value.num == 1 and event.histogram_value.sum == 0.5
