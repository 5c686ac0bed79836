"""Checkpoints: plain tensors and numbers, written whole or not at all, the one before kept.

Reading one executes nothing (`weights_only`); a truncated one is passed over for the one before.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedbench.options import ConfigError, require

log = logging.getLogger(__name__)
NAME, PREVIOUS = "checkpoint.pt", "checkpoint.prev.pt"
PARTS = {"round", "config_hash", "partition_hash", "algorithm", "rows", "record", "executor"}


def save(run_dir: Path, state: dict[str, Any]) -> None:
    """Write state (tensors, numbers, strings, and dicts and lists of them) as the run's checkpoint."""
    path, partial = run_dir / NAME, run_dir / (NAME + ".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        os.replace(path, run_dir / PREVIOUS)
    os.replace(partial, path)


def load(run_dir: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The newest readable checkpoint of a run."""
    paths = [p for p in (run_dir / NAME, run_dir / PREVIOUS) if p.exists()]
    require(bool(paths), f"resume={run_dir}: there is no {NAME} in this folder, so there is nothing to resume")
    problems = []
    for path in paths:
        try:
            state = torch.load(path, map_location=device, weights_only=True, mmap=True)      # rows may be many
            require(isinstance(state, dict) and state.keys() >= PARTS, "not a checkpoint of fedbench")
            return state
        except Exception as error:        # a truncated archive raises many kinds of error
            problems.append(f"{path.name}: {(str(error) or type(error).__name__).splitlines()[0][:160]}")
            log.warning("%s cannot be read (truncated, or not plain tensors); trying the one before", path)
    raise ConfigError(f"resume={run_dir}: no checkpoint can be read ({'; '.join(problems)})")


class Clock:
    """When to write: every n rounds, only at the end (0), or (None) as often as costs under 5% of the time."""

    def __init__(self, every: int | None):
        self.every, self.cost, self.last = every, 0.0, -float("inf")

    def due(self, done: int, final: bool) -> bool:
        """done: rounds finished."""
        if final or self.every:
            return final or done % (self.every or 1) == 0
        return self.every is None and time.monotonic() - self.last > 20 * self.cost

    def time(self, write: Callable[[], None]) -> None:
        """Write, and remember what it took."""
        began = time.monotonic()
        write()
        self.last = time.monotonic()
        self.cost = self.last - began
