"""MLflow has a run's configuration, scores and status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.simulation.callbacks.mlflow import MLflow

pytestmark = pytest.mark.slow  # importing mlflow takes seconds


@pytest.fixture(autouse=True)
def _mlflow() -> None:
    """Import it only where these tests run, not wherever they are collected."""
    pytest.importorskip("mlflow")


def started(folder: Path, saved: str | None = None, **options: Any) -> tuple[MLflow, Any]:
    cfg = compose([f"output_dir={folder}", f"sweep_dir={folder}/sweep", "tracking=disabled", "tracking.group=sweep"])
    at = SimpleNamespace(cfg=cfg, run_dir=folder / "sweep" / "seed=0", done=0)
    callback = MLflow(**options)
    callback.on_start(at, saved)  # type: ignore[arg-type]
    return callback, at


def test_a_run_is_created_and_continued(tmp_path: Path) -> None:
    callback, at = started(tmp_path)
    for at.done in (1, 2):
        callback.on_evaluation(at, {"personal/accuracy": at.done / 10, "personal/auc": float("nan")}, {})
        callback.on_round_end(at, {"steps": 3, "peak_memory_mb": None})  # type: ignore[dict-item]
    id = callback.on_checkpoint(at)
    callback.on_end(at, "interrupted", {})
    again, at = started(tmp_path, id)
    assert again.on_checkpoint(at) == id
    again.on_end(at, "finished", {})
    client = again._client
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    (stored,) = client.search_runs([experiment.experiment_id])
    assert experiment.name == "sweep" and stored.info.run_name.endswith("-s0 seed=0")
    assert stored.info.status == "FINISHED" and stored.data.params["algorithm.mu"]
    history = client.get_metric_history(id, "personal/accuracy")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2)]
    assert stored.data.metrics["cost/steps"] == 3 and "cost/peak_memory_mb" not in stored.data.metrics
    assert (tmp_path / "mlruns").is_dir()


def test_a_deleted_run_is_created_anew(tmp_path: Path) -> None:
    callback, at = started(tmp_path, uri=str(tmp_path / "store"), experiment="mine")
    id = callback.on_checkpoint(at)
    callback._client.delete_run(id)
    again, at = started(tmp_path, id, uri=str(tmp_path / "store"), experiment="mine")
    assert again.on_checkpoint(at) != id and not (tmp_path / "mlruns").exists()


def test_a_store_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.mlflow\.uri=gopher://nowhere cannot be used"):
        started(tmp_path, uri="gopher://nowhere")
