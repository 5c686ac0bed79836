"""Run one experiment in its folder.

`simulate` is the only way a run happens.  For new runs and the cells of a sweep, `start` decides first what is to do in
a folder: begin, resume or skip.  `resume=` has decided before (app/resume.py), and calls `simulate` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from fedbench.config.choices import named_classes
from fedbench.core import gc_pause, signals
from fedbench.core.files import read_json
from fedbench.core.lock import writing
from fedbench.core.settings import config_hash
from fedbench.simulation.log import Output, logged
from fedbench.simulation.processes import broadcast_run
from fedbench.simulation.result import score_of
from fedbench.simulation.run_folder import (
    check_files,
    is_finished,
    is_resumable,
    remove_leftovers,
    save_request,
    set_aside,
    stored_config,
)
from fedbench.simulation.status import ERROR, record_failure, record_interruption, write_status
from fedbench.simulation.status import FILE as STATUS


class Ended(NamedTuple):
    """A run that is finished: its summary, and whether it was finished before."""

    summary: dict[str, Any]
    already: bool = False


def start(
    config: Mapping[str, Any], folder: Path, hydra: DictConfig, command: str = "", output: Output = "lines"
) -> Ended:
    """Begin a run in its folder, or resume it, unless it is finished.

    The files of another run in the folder are set aside.

    Args:
        config: Checked values (config/check.py).
        folder: The run folder, which exists.
        hydra: Hydra's node of the composed configuration, kept in the folder.
        command: The command as typed, for summary.json.
        output: What is printed.

    Raises:
        Busy: Another process writes into the folder.
        Exception: Whatever `simulate` raises.
    """
    with writing(folder):
        with recorded(folder):
            action, config = _decide(config, folder, hydra)
        if action == "skip":
            return skip(folder)
        return Ended(simulate(config, folder, action == "resume", command, output))


def _decide(config: Mapping[str, Any], folder: Path, hydra: DictConfig) -> tuple[str, Mapping[str, Any]]:
    """Return what is to do in a run folder (begin, resume or skip), and the config to do it with."""
    stored = stored_config(folder)
    if stored is not None and not _is_same_run(stored, config):
        set_aside(folder)
        stored = None
    if stored is None:
        save_request(config, hydra, folder)
        return "begin", config
    if is_finished(folder, config):
        return "skip", config
    if is_resumable(folder):
        # The hardware options are those of the first part: they are needed for bit-exact resuming.
        return "resume", {**config, "hardware": stored["hardware"]}
    return "begin", config


def skip(folder: Path) -> Ended:
    """Print that the run in a folder is finished, and return its summary.

    status.json is written again if a later attempt in this folder was stopped or failed.
    """
    print(f"{folder}: finished already", flush=True)
    summary = read_json(folder / "summary.json")
    if read_json(folder / STATUS).get("status", "finished") != "finished":
        write_status(folder, "finished", score_of(summary))
        (folder / ERROR).unlink(missing_ok=True)
    return Ended(summary, already=True)


def simulate(
    config: Mapping[str, Any], folder: Path, resume: bool = False, command: str = "", output: Output = "lines"
) -> dict[str, Any]:
    """Run the rounds of a checked configuration, and return the summary.

    How the run ended is recorded in status.json, and in error.txt after a failure.  The caller holds the folder's lock.

    Args:
        config: Checked values (config/check.py).
        folder: The run folder.
        resume: Whether to go on from the folder's checkpoint.
        command: The command as typed, for summary.json.
        output: What is printed.

    Raises:
        ConfigError: A mistake that the user can repair.
        KeyboardInterrupt: A stop signal arrived; the run is saved if it had a checkpoint.
        Exception: Whatever the method, the model or the data raised.
    """
    check_files(folder)
    remove_leftovers(folder)
    write_status(folder, "running")
    (folder / ERROR).unlink(missing_ok=True)
    gc_pause.resume()
    cfg = OmegaConf.create(dict(config))
    OmegaConf.set_readonly(cfg, True)
    with logged(folder, output), recorded(folder):
        from fedbench.simulation.simulator import run  # torch

        broadcast_run((config, folder, resume))
        origin = {"command": command, "classes": named_classes(config)}
        summary = run(cfg, folder, resume, origin, output)
    write_status(folder, "finished", score_of(summary))
    return summary


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for every stop signal in this block, so that runs are saved before a scheduler ends them.

    Signals are passed on to the launcher's handlers when the block ends (core/signals.py).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with signals.handled(interrupt):
        yield


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record how the block ended, if not well."""
    try:
        yield
    except KeyboardInterrupt:
        record_interruption(folder)
        raise
    except (Exception, SystemExit) as error:  # a method that calls sys.exit() did not finish its run
        record_failure(folder, error)
        raise


def _is_same_run(stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether two configs ask for the same run; a stored one that was cut off asks for none."""
    try:
        return config_hash(stored) == config_hash(config)
    except (KeyError, TypeError, AttributeError):
        return False
