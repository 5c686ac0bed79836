"""Finding run directories and reading them; everything is read when it is first asked for."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedbench.options import ConfigError, require

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SKIPPED = (".hydra", "wandb")


class Run:
    """A run directory; ``summary`` is what summary.json says (empty where there is none or it is damaged)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.summary = read_json(path / "summary.json")

    @property
    def finished(self) -> bool:
        return self.summary.get("status") == "finished"

    @property
    def seed(self) -> Any:
        return self.summary.get("seed")

    def choice(self, group: str) -> str | None:
        """The option chosen in a config group: choice("dataset")."""
        chosen = self.summary.get(group)
        return (self.config.get("choices") or {}).get(group) if chosen is None else chosen

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, nested; empty where there is none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        with path.open(encoding="utf-8") as file:
            return yaml.load(file, LOADER) or {}

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """The resolved configuration by dotted names."""
        return flatten(self.config)

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of metrics.csv, float64 [evaluated rounds] each."""
        return read_columns(self.path / "metrics.csv")

    @cached_property
    def costs(self) -> dict[str, np.ndarray]:
        """Columns of costs.csv, float64 [rounds] each."""
        return read_columns(self.path / "costs.csv")

    def clients(self, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rounds [R], client ids [N], values [R, N]) of a column of clients.csv; NaN without a row."""
        path = self.path / "clients.csv"
        header = read_header(path)
        if metric not in header:
            return np.empty(0), np.empty(0), np.empty((0, 0))
        columns = (header.index("round"), header.index("client"), header.index(metric))
        try:
            cells = np.loadtxt(path, delimiter=",", skiprows=1, usecols=columns, ndmin=2)  # [rows, 3]
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
        rounds, row = np.unique(cells[:, 0], return_inverse=True)
        ids, column = np.unique(cells[:, 1], return_inverse=True)
        values = np.full((len(rounds), len(ids)), np.nan)  # [R, N]
        values[row, column] = cells[:, 2]
        return rounds, ids, values


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Every run directory in or below the folders, sorted by path; ConfigError where there is none."""
    found: set[Path] = set()
    folders = [Path(folder) for folder in folders]
    for folder in folders:
        require(folder.is_dir(), f"{folder} is not a folder; give folders that contain runs")
        for here, inside, files in os.walk(folder):
            inside[:] = [name for name in inside if name not in SKIPPED]
            if "summary.json" in files or ("config.yaml" in files and {"metrics.csv", "error.txt"} & set(files)):
                found.add(Path(here))
    where = " or ".join(map(str, folders))
    require(
        bool(found),
        f"no runs found in {where}: a run is a folder with a summary.json (python -m fedbench makes one)",
    )
    return [Run(path) for path in sorted(found)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where the file is missing or damaged."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def read_header(path: Path) -> list[str]:
    """Column names of a CSV file; none where it is missing or empty."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Columns of a CSV file of numbers, float64; empty cells are NaN; a line cut by a crash is left out."""
    header = read_header(path)
    if not header:
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == len(header)][1:]
    try:
        return {name: np.array([float(row[i] or "nan") for row in rows]) for i, name in enumerate(header)}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, the names joined by a dot."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
