"""Prepare a single run from the command line: check its configuration, make its folder, print its errors."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.run_keys import RESERVED
from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import config_hash, show
from fedbench.simulation.log import notice
from fedbench.simulation.processes import TORCHRUN, under_torchrun
from fedbench.simulation.run_folder import check_files, has_begun
from fedbench.simulation.simulate import Ended, interruptible
from fedbench.simulation.status import interrupted, reason_of

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130  # exit statuses


def checked(composed: DictConfig, hydra: DictConfig) -> dict[str, Any]:
    """Check a composed configuration, and return its values.

    Args:
        composed: The configuration.
        hydra: The value of the configuration's key hydra, with the overrides and the chosen options.

    Raises:
        ConfigError: A value is invalid.
    """
    values = check(with_choices(composed, hydra))
    fold, folds = values["fold"], values["folds"]
    require(
        fold == 0 or folds is not None,
        f"fold={fold} is a fold of cross-validation and needs the number of folds: add it, as in folds=5",
    )
    return values


def check_processes(full: DictConfig, arguments: list[str]) -> None:
    """Check that a run uses hardware=ddp if and only if torchrun started several processes.

    Args:
        full: The composed configuration.
        arguments: The arguments of the command, for the error message.

    Raises:
        ConfigError: hardware=ddp without torchrun, or several processes without hardware=ddp.
    """
    started, shares_run = under_torchrun(), bool(full.hardware.get("ddp"))
    require(
        started or not shares_run,
        "hardware=ddp needs processes that torchrun starts: type torchrun "
        f"--nproc-per-node=<number> -m fedbench {shlex.join(arguments)}",
    )
    size = os.environ.get("WORLD_SIZE", "1")
    require(
        shares_run or not started or size == "1",
        f"torchrun started {size} processes: add hardware=ddp, so that they share the run",
    )


@dataclass(frozen=True)
class RunFolder:
    """The folder of a single run (``path``), and the innermost folder that existed before the command (``existing``).

    Attributes:
        path: The folder.
        existing: The innermost folder of the path that existed before the run.
    """

    path: Path
    existing: Path

    def remove_if_never_begun(self) -> None:
        """Remove the run folder, and empty folders above it, as far as this command made them.

        Do nothing if the run has begun: it has a checkpoint, or a finished round in summary.json.
        """
        if self.existing == self.path or has_begun(self.path):
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self.path.parents:
            if parent == self.existing:
                break
            with suppress(OSError):  # not empty
                parent.rmdir()


def new_folder(full: DictConfig, config: dict[str, Any]) -> RunFolder:
    """Make the folder of a single run, hydra.run.dir.

    A folder that the command names may exist.  A default folder is always new, except if torchrun restarts the run.

    Args:
        full: The composed configuration, with its key hydra (Hydra's own options).
        config: The checked configuration.

    Returns:
        The folder, with the innermost folder at or above its path that existed before.
    """
    is_named = any(text.lstrip("+").startswith("hydra.run.dir=") for text in full.hydra.overrides.hydra)
    path = Path(_run_dir(full)).absolute()
    starts_again = under_torchrun() and not is_named
    if starts_again:
        path = _torchruns_folder(path.parent, config)
    fresh = not is_named and not starts_again
    # a new folder gets another path if this one exists
    candidates = list(path.parents) if fresh else [path, *path.parents]
    existing = next(folder for folder in candidates if folder.exists())
    return RunFolder(make_folder(path, fresh).absolute(), existing)


class Attempt(NamedTuple):
    """The result of an attempt to run an experiment.

    Attributes:
        status: The exit status.
        folder: The run folder.
        ended: The result of the run; None after a failure.
        error: The exception of a failed run.
        reason: One sentence about it.
    """

    status: int
    folder: Path
    ended: Ended | None = None
    error: BaseException | None = None
    reason: str = ""


def attempt(folder: Path, work: Callable[[], Ended]) -> Attempt:
    """Call a function that runs an experiment, and print one sentence if it fails.

    Args:
        folder: The run folder.
        work: Runs the experiment, and returns its result.

    Returns:
        The exit status and the folder, with the result of the function or its exception.

    Raises:
        KeyboardInterrupt: The run was interrupted; with a sentence that names the command to resume it.
        SystemExit: A signal was received, and the launcher's handler of it, which is called last, ends the process.
    """
    with interruptible():
        try:
            return Attempt(OK, folder, work())
        except KeyboardInterrupt as interrupt:
            sentence = interrupted(folder)
            notice(sentence)
            raise KeyboardInterrupt(sentence) from interrupt
        except (Exception, SystemExit) as error:
            reason = reason_of(error, folder)
            notice(reason)
            # A ConfigError itself is a mistake in the command; its subclasses are failures of a run.
            return Attempt(MISTAKE if type(error) is ConfigError else FAILED, folder, error=error, reason=reason)


def make_folder(folder: Path, fresh: bool) -> Path:
    """Make a run's folder.

    Args:
        folder: The folder.
        fresh: Whether the folder must be new.  Then a number is appended to its name if it exists, because two runs may
            start in the same second.

    Returns:
        The folder, with the number if one was appended.

    Raises:
        ConfigError: The folder cannot be made, or is not writable.
    """
    names = (folder.with_name(f"{folder.name}-{k}") if k else folder for k in count())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not fresh:
            folder.mkdir(exist_ok=True)
        run_folder = next(name for name in names if _is_made(name)) if fresh else folder
        require(
            os.access(run_folder, os.W_OK),
            f"cannot write into {run_folder}: set output_dir, or sweep_dir with -m, to a folder that you may write to",
        )
        check_files(run_folder)  # no output file's name may be that of a subfolder
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"cannot make the folder {folder} ({why}): set output_dir, or sweep_dir with -m, to a folder that you may "
            "write to"
        ) from error
    return run_folder


def folder_key(full: DictConfig, key: str) -> str:
    """Return the value of a key that names a folder, with ~ expanded.

    Args:
        full: The composed configuration, with its key hydra (Hydra's own options).
        key: The dotted key, such as "hydra.run.dir".

    Raises:
        ConfigError: The value cannot be resolved or is empty.
    """
    try:
        value = OmegaConf.select(full, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    require(bool(str(value or "").strip()), f"{key} must be the path of a folder, got {show(value)}")
    return os.path.expanduser(str(value))


def _is_made(folder: Path) -> bool:
    """Make a folder.  Return True if it was made, and False if it existed already."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _run_dir(full: DictConfig) -> str:
    """Return hydra.run.dir.

    If a class of the user replaces that of a chosen option, the path has the name of this class.
    """
    choices = with_choices(full, full.hydra).choices  # the option of each group, or the class that replaces it
    hydra_choices = full.hydra.runtime.choices  # to which hydra.run.dir refers
    with flag_override(hydra_choices, ["struct", "readonly"], [False, False]):  # they are read-only
        hydra_choices.update({group: choices[group] for group in RESERVED})  # the groups whose options are classes
    return folder_key(full, "hydra.run.dir")


def _torchruns_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Return the run folder of the processes that torchrun started.

    Its name has a hash of TORCHELASTIC_RUN_ID and of the configuration, so a restarted command finds it again.  Without
    --rdzv-id all commands have the id "none".  Then the host and the process id of torchrun distinguish them.

    Args:
        folder: The folder in which the run folder is.
        config: The checked configuration.

    Returns:
        The first such folder, with a number if needed, whose run is not finished.
    """
    run_id = os.environ[TORCHRUN]  # TORCHELASTIC_RUN_ID
    agent = [socket.gethostname(), os.getppid()] if run_id in ("", "none") else []
    name = hashlib.sha256(json.dumps([run_id, *agent, config_hash(config)]).encode()).hexdigest()[:8]
    names = (folder / f"torchrun-{name}{f'-{k}' if k else ''}" for k in count())
    return next(path for path in names if read_json(path / "summary.json").get("status") != "finished")
