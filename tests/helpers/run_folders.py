"""Folders of finished runs, written by hand."""

import zipfile
from pathlib import Path

import numpy as np
import yaml

from fedbench.config.conf_tree import target_of
from fedbench.simulation.callbacks.tables import Tables
from fedbench.simulation.summary import write_summary

BASE = np.array([0.5, 0.6, 0.7, 0.8])  # of four clients at round 1


def make_run(
    folder: Path,
    algorithm: str = "pgfed",
    seed: int = 0,
    curve: tuple[float, ...] = (0.0, 0.1, 0.05),
    status: str = "finished",
    config: dict | None = None,
    summary: dict | None = None,
    clients: np.ndarray | None = None,
    val: np.ndarray | None = None,
) -> Path:
    """Write a run of 4 clients: client i has BASE[i] + curve[t] at round t, or clients[t, i]; val has their
    validation accuracies."""
    path = folder / f"{algorithm}-{seed}-{len(list(folder.glob('*'))) if folder.is_dir() else 0}"
    path.mkdir(parents=True)
    chosen = {"algorithm": algorithm, "dataset": "digits", "partition": "dirichlet", "model": "mlp"}
    given = config or {}
    full = {
        "name": None,
        "seed": seed,
        "rounds": 3,
        "output_dir": str(path),
        "tracking": {"mode": "disabled"},
        "optimizer": {"lr": 0.1},
        "algorithm": {"_target_": target_of("algorithm", algorithm)},
    }
    full |= {key: value for key, value in given.items() if key != "choices"}
    full["choices"] = chosen | given.get("choices", {})
    (path / "config.yaml").write_text(yaml.safe_dump(full))
    if clients is None:
        clients = BASE + np.array(curve)[:, None]
    tables = Tables()
    tables.open(path)
    for t, accuracy in enumerate(clients, start=1):
        tables.add_metrics(t, {
            "personal/accuracy": accuracy.mean(), "personal/accuracy_worst": accuracy.min(),
            "personal/loss": 1 - accuracy.mean(),
            **({} if algorithm == "local" else {"global/accuracy": accuracy.mean() - 0.3}),
            **({} if val is None else {"val/accuracy": val[t - 1].mean()}),
        })  # fmt: skip
        columns = {"n_test": np.full(4, 9), "personal/accuracy": accuracy, "personal/loss": 1 - accuracy}
        tables.add_clients(t, columns if val is None else columns | {"val/accuracy": val[t - 1]})
        tables.add_costs(t, {"train_s": 2.0 * t, "eval_s": 100.0, "images_per_s": 1000.0})
    tables.close()
    facts = {"status": status, "name": algorithm, "seed": seed, "rounds": 3, "rounds_done": 3}
    facts |= {"num_clients": 4, "cohort": 2, "partition_hash": "p0", "best_val": None}
    facts |= {"cost": {"images_per_s": 1000.0 + seed}, "finished": f"2026-01-01T00:00:{seed:02}"}
    write_summary(path, facts | full["choices"] | (summary or {}))
    return path


def with_checkpoint(path: Path) -> Path:
    """Of a run: something that is no truncated zip file."""
    with zipfile.ZipFile(path / "checkpoint.pt", "w"):
        return path
