"""Write and read checkpoints.

Checkpoints contain tensors, numbers and text, are written atomically, and the previous one is kept.  Reading a
checkpoint runs no code (`weights_only`).  The previous checkpoint is used if the last one is truncated, does not match
its digest, or does not fit the run's tables.
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
    """Write the checkpoint of a run, with its digest.

    Args:
        run_dir: The run folder.
        state: Tensors, numbers, strings, and dicts and lists of them.
        rotate: Whether to keep the existing checkpoint as the previous one.  False if it is damaged.
    """
    # `load` adds "file", the name of the file, which is not part of the content
    state = on_host({name: value for name, value in state.items() if name not in ("digest", "file")})
    state["digest"] = digest(_arrays(state))
    path = run_dir / NAME
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            dump(state, file)
            file.flush()
            os.fsync(file.fileno())  # before the existing checkpoint is renamed
        if path.exists() and rotate:
            os.replace(path, run_dir / PREVIOUS)


def dump(state: dict[str, Any], file: IO[bytes]) -> None:
    """Write a state into an open file by torch.save.

    Args:
        state: The content of the checkpoint.
        file: The file, open for writing.

    Raises:
        OSError: The disk is full, for example.  torch.save itself raises a RuntimeError instead.
    """
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def on_host(value: Any) -> Any:
    """Return nested dicts with all tensors detached and in host memory; those that are there already are not copied."""
    if isinstance(value, Mapping):
        return {name: on_host(item) for name, item in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _arrays(value: Any) -> Any:
    """Return nested dicts in which each tensor is replaced by a list, so that `digest` can hash them.

    The list has the type as text, the shape as a list, and the bytes as a NumPy array uint8 [bytes].
    """
    if isinstance(value, Mapping):
        return {name: _arrays(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        flat = value.contiguous().view(-1) if value.numel() else torch.empty(0)
        return [str(value.dtype), list(value.shape), flat.view(torch.uint8).numpy()]
    return value


def load(run_dir: Path, device: torch.device | str = "cpu", tables: bool = True) -> dict[str, Any]:
    """Return the newest intact checkpoint of a run, with its file name as ``file``.

    Args:
        run_dir: The run folder.
        device: The device of the tensors.
        tables: Whether to check that the run's tables begin as they were when the checkpoint was written.

    Raises:
        ConfigError: There is no intact checkpoint.
    """
    paths = [p for p in (run_dir / NAME, run_dir / PREVIOUS) if p.exists()]
    require(
        bool(paths),
        f"resume={run_dir}: there is no {NAME} in this folder: name the folder of a run that has finished a round",
    )
    problems = []
    for path in paths:
        try:
            state = read_weights(path, device, mmap=True)  # mmap: the state may be larger than memory
            _check(path, state)
            damaged = differing(run_dir, state.get("tables", {}), whole=False) if tables else None
            require(
                damaged is None,
                f"{damaged} was shortened or changed after this checkpoint was written: restore {damaged}",
            )
            return {**state, "file": path.name}
        except DAMAGE as error:  # the first line of its message, of at most 300 characters
            problems.append(f"{path.name}: {(str(error) or type(error).__name__).splitlines()[0][:300]}")
            if path != paths[-1]:
                log.warning("%s cannot be used (%s); trying the previous one", path, problems[-1].partition(": ")[2])
    raise ConfigError(
        f"resume={run_dir}: no checkpoint can be used ({'; '.join(problems)}); without a backup of these files, start "
        "a new run"
    )


def _check(path: Path, state: Any) -> None:
    """Check that a file is an undamaged checkpoint.

    Args:
        path: The file.
        state: Its content.

    Raises:
        ConfigError: The content is not a checkpoint, or differs from the digest that was stored with it.
    """
    is_checkpoint = isinstance(state, dict) and state.keys() >= PARTS
    entries = ", ".join(sorted(PARTS))
    require(is_checkpoint, f"the file is not a checkpoint of fedbench, which has the entries {entries}: restore it")
    if "digest" in state:
        content = {name: value for name, value in state.items() if name != "digest"}
        require(digest(_arrays(on_host(content))) == state["digest"], "the file was changed or damaged: restore it")
        return
    with zipfile.ZipFile(path) as archive:
        require(archive.testzip() is None, "the file was changed or damaged: restore it")
    log.warning("%s was written by an old version of fedbench without digests: changes cannot be detected", path)
