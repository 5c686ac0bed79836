"""The status of a run: status.json, error.txt, and a sentence with the command that resumes it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shlex
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedbench.config.conf_tree import models_with
from fedbench.config.targets import to_repeat
from fedbench.core.files import replace_text
from fedbench.core.options import ConfigError, MissingColumns, PeerLost
from fedbench.core.settings import load_config
from fedbench.core.suggest import suggested
from fedbench.simulation.processes import under_torchrun
from fedbench.simulation.run_folder import config_dir_of, is_resumable

log = logging.getLogger(__name__)
STATUS_FILE, ERROR_FILE = "status.json", "error.txt"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_status(folder: Path, status: str, score: float = math.nan, sentence: str = "") -> None:
    """Write status.json.  Write errors are ignored.

    Args:
        folder: The run folder.
        status: running, finished, paused, failed or interrupted.
        score: The score of the run (result.py).  NaN: none.
        sentence: One sentence about an error or an interruption.
    """
    values = {"status": status, "score": None if math.isnan(score) else score, "sentence": sentence}
    _try_to_write(folder / STATUS_FILE, json.dumps(values))


def record_failure(folder: Path, error: BaseException) -> None:
    """Write status.json and error.txt of a failed run.

    Args:
        folder: The run folder.
        error: The exception that is being handled.  error.txt contains its sentence and traceback.
    """
    _try_to_write(folder / ERROR_FILE, f"{sentence_of(error, folder)}\n\n{traceback.format_exc()}")
    write_status(folder, "failed", sentence=sentence_of(error, folder))
    log.debug("failed", exc_info=True)  # into run.log only


def reason_of(error: BaseException, folder: Path) -> str:
    """Return one line about an error of a run: `sentence_of`, followed by the file with the traceback.

    The file is omitted if it does not exist, or if the error is a ConfigError.
    """
    sentence = sentence_of(error, folder)
    if isinstance(error, ConfigError) or not (folder / ERROR_FILE).is_file():
        return sentence
    return f"{sentence} (the traceback is in {folder / ERROR_FILE})"


def record_interruption(folder: Path) -> None:
    """Write to status.json that the run in a folder was interrupted, and how to resume it."""
    write_status(folder, "interrupted", sentence=interrupted(folder))


def interrupted(folder: Path) -> str:
    """Return "interrupted; it is saved; ..." with the command that resumes the run, or why it is not saved.

    Args:
        folder: The run folder.
    """
    return f"interrupted; it is {how_to_resume(folder)}"


def paused(folder: Path, summary: Mapping[str, Any]) -> str:
    """Return a sentence about a run that checkpoint.pause_after ended, with the command that resumes it.

    Args:
        folder: The run folder.
        summary: The content of summary.json.
    """
    return f"paused after round {summary['rounds_done']} of {summary['rounds']}; it is {how_to_resume(folder)}"


def sentence_of(error: BaseException, folder: Path) -> str:
    """Return one line about an error: what happened, and how to resume the run if that may help.

    Args:
        error: The exception that ended the run.
        folder: The run folder.
    """
    if isinstance(error, PeerLost):
        return f"{error}; up to its last checkpoint the run is {how_to_resume(folder)}"
    # MissingColumns: the model lacks a column group, a named set of parameters, that the method needs
    if isinstance(error, MissingColumns) and (others := models_with(error.columns)):
        return f"{error}, or choose a model that has this group: {', '.join(others)}"
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the run did not finish, because its code called sys.exit({error.code!r}): remove this call"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        how = how_to_resume(folder)
        return f"the disk of {folder} is full ({error.strerror}): free some space; the run is {how}"
    first = next(iter(str(error).splitlines()), "no message")
    return f"{type(error).__name__}: {first}"


def how_to_resume(folder: Path) -> str:
    """Return the end of a sentence about a stopped run: "saved; resume it with: COMMAND", or why it is not saved."""
    if not is_resumable(folder):
        return f"not saved, because it had no checkpoint yet; its files are in {folder}"
    return f"saved; resume it with: {resume_command(folder)}"


def resume_command(folder: Path) -> str:
    """Return the shell command that resumes the run in a folder, as in "python -m fedbench resume=runs/a"."""
    config_dir, overrides = needed_to_resume(folder)
    flags = [] if config_dir is None else ["--config-dir", config_dir]
    return suggested(f"{started_by()} {shlex.join([*flags, f'resume={folder}', *overrides])}")


def needed_to_resume(folder: Path) -> tuple[str | None, list[str]]:
    """Return the options that a command must repeat to resume a run.

    Returns:
        The --config-dir, or None; and the overrides that name the user's classes and trusted pickles.
    """
    config, config_dir = folder / "config.yaml", config_dir_of(folder)
    if config_dir is not None and not Path(config_dir).is_dir():  # it was deleted or moved
        config_dir = None
    stored = OmegaConf.to_container(load_config(config)) if config.is_file() else {}
    return config_dir, to_repeat(stored, config_dir)  # type: ignore[arg-type]


def started_by() -> str:
    """Return how this process was started, without options: "python -m fedbench", or torchrun with its processes.

    For example: "torchrun --nproc-per-node=2 -m fedbench".
    """
    if not under_torchrun():
        return "python -m fedbench"
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    nodes_flag = f"--nnodes={machines} " if machines != "1" else ""
    return f"torchrun {nodes_flag}--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', '1')} -m fedbench"


def _try_to_write(path: Path, text: str) -> bool:
    """Replace a text file, and return whether that worked.

    A write error is not raised, because a full disk must not hide the error that ended the run.
    """
    try:
        replace_text(path, [text], durable=False)
    except OSError:
        return False
    return True
