"""Checkpoints: plain tensors and numbers, written whole or not at all, the one before kept.

Reading one executes nothing (`weights_only`).  One that is cut off, whose content does not give the digest that it
carries, or beside which the run's tables are no longer what they were, is passed over for the one before.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedbench.core.digests import differing, digest
from fedbench.core.files import DAMAGE, replacing
from fedbench.core.options import ConfigError, require
from fedbench.core.weights import read_weights

log = logging.getLogger(__name__)
NAME, PREVIOUS = "checkpoint.pt", "checkpoint.prev.pt"
PARTS = {"round", "config_hash", "partition_hash", "algorithm", "rows", "record", "executor"}


def save(run_dir: Path, state: dict[str, Any], rotate: bool = True) -> None:
    """Write state (tensors, numbers, strings, and dicts and lists of them) as the run's checkpoint, with its digest.
    rotate: keep the one that is there as the one before (else it is damaged, and the one before stays)."""
    state = on_host({name: value for name, value in state.items() if name not in ("digest", "file")})
    state["digest"] = digest(_arrays(state))
    path = run_dir / NAME
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            dump(state, file)
            file.flush()
            os.fsync(file.fileno())  # before the one that is there loses its name
        if path.exists() and rotate:
            os.replace(path, run_dir / PREVIOUS)


def dump(state: dict[str, Any], file: IO[bytes]) -> None:
    """torch.save, whose own words for a full disk name neither the disk nor that it is full."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def on_host(value: Any) -> Any:
    """value with its tensors in host memory."""
    if isinstance(value, Mapping):
        return {name: on_host(item) for name, item in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _arrays(value: Any) -> Any:
    """value with each tensor as its type, shape and bytes."""
    if isinstance(value, Mapping):
        return {name: _arrays(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        flat = value.contiguous().view(-1) if value.numel() else torch.empty(0)
        return [str(value.dtype), list(value.shape), flat.view(torch.uint8).numpy()]
    return value


def load(run_dir: Path, device: torch.device | str = "cpu", tables: bool = True) -> dict[str, Any]:
    """The newest checkpoint of a run that is whole, and its name as ``file``.  tables: and beside which the tables are
    what they were."""
    paths = [p for p in (run_dir / NAME, run_dir / PREVIOUS) if p.exists()]
    require(bool(paths), f"resume={run_dir}: there is no {NAME} in this folder, so there is nothing to resume")
    problems = []
    for path in paths:
        try:
            state = read_weights(path, device, mmap=True)  # there may be many rows
            _check(path, state)
            damaged = differing(run_dir, state.get("tables", {}), whole=False) if tables else None
            require(damaged is None, f"{damaged} was cut or changed since")
            return {**state, "file": path.name}
        except DAMAGE as error:
            problems.append(f"{path.name}: {(str(error) or type(error).__name__).splitlines()[0][:160]}")
            if path != paths[-1]:
                log.warning("%s cannot be used (%s); trying the one before", path, problems[-1].partition(": ")[2])
    raise ConfigError(f"resume={run_dir}: no checkpoint can be read ({'; '.join(problems)})")


def _check(path: Path, state: Any) -> None:
    require(isinstance(state, dict) and state.keys() >= PARTS, "not a checkpoint of fedbench")
    if "digest" in state:
        content = {name: value for name, value in state.items() if name != "digest"}
        require(digest(_arrays(on_host(content))) == state["digest"], "its content is not what was written")
        return
    with zipfile.ZipFile(path) as archive:
        require(archive.testzip() is None, "its content is not what was written")
    log.warning("%s is of a version of fedbench that kept no digests: what was edited cannot be noticed", path)
