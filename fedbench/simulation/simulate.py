"""Run one experiment in its folder.

New runs and runs of a sweep call `start`, which begins, resumes or skips the run and then calls `simulate`.
The command `resume=FOLDER` calls `simulate` directly (app/resume.py).
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
from fedbench.simulation.status import (
    ERROR_FILE,
    STATUS_FILE,
    paused,
    record_failure,
    record_interruption,
    write_status,
)


class Ended(NamedTuple):
    """The result of a finished or paused run.

    Attributes:
        summary: The content of summary.json.
        already: Whether the run was finished before this command.
    """

    summary: dict[str, Any]
    already: bool = False


def start(
    config: Mapping[str, Any], folder: Path, hydra: DictConfig, command: str = "", output: Output = "lines"
) -> Ended:
    """Run an experiment in its folder: begin it, resume it, or skip it if it is finished.

    If the folder contains another run, its files are moved to a new folder first.

    Args:
        config: The checked configuration (config/check.py).
        folder: The run folder.  It must exist.
        hydra: The value of the key hydra in the composed configuration, which is saved in the folder.
        command: The command as typed, for summary.json.
        output: What the run prints: "lines", "bar" or "warnings".

    Returns:
        The summary, and whether the run was already finished.

    Raises:
        Busy: Another process writes into the folder.
        Exception: Any exception of `simulate`.
    """
    with writing(folder):
        with recorded(folder):
            action, config = _decide(config, folder, hydra)
        if action == "skip":
            return skip(folder)
        return Ended(simulate(config, folder, action == "resume", command, output))


def _decide(config: Mapping[str, Any], folder: Path, hydra: DictConfig) -> tuple[str, Mapping[str, Any]]:
    """Decide what to do in a run folder, and prepare the folder for it.

    Args:
        config: The checked configuration.
        folder: The run folder.
        hydra: The value of the key hydra in the composed configuration.

    Returns:
        "begin", "resume" or "skip" (the run is finished); and the configuration to run.  A resumed run has the hardware
        options with which it began.
    """
    stored = stored_config(folder)
    if stored is not None and not is_same_run(stored, config):
        set_aside(folder)
        stored = None
    if stored is None:
        save_request(config, hydra, folder)
        return "begin", config
    if is_finished(folder, config):
        return "skip", config
    if is_resumable(folder):
        # Bit-exact resuming needs the hardware options with which the run began.
        return "resume", {**config, "hardware": stored["hardware"]}
    return "begin", config


def skip(folder: Path) -> Ended:
    """Print that the run in a folder is finished, and return its result: the content of summary.json.

    If a later attempt in this folder failed or was stopped, status.json is set back to "finished".
    """
    print(f"{folder}: finished already", flush=True)
    summary = read_json(folder / "summary.json")
    if read_json(folder / STATUS_FILE).get("status", "finished") != "finished":
        write_status(folder, "finished", score_of(summary))
        (folder / ERROR_FILE).unlink(missing_ok=True)
    return Ended(summary, already=True)


def simulate(
    config: Mapping[str, Any], folder: Path, resume: bool = False, command: str = "", output: Output = "lines"
) -> dict[str, Any]:
    """Run the rounds of a checked configuration up to the last one or a pause, and return the summary.

    The outcome is recorded in status.json, and an error also in error.txt.  The caller must hold the folder's lock.

    Args:
        config: The checked configuration (config/check.py).
        folder: The run folder.
        resume: Whether to resume from the folder's checkpoint.
        command: The command as typed, for summary.json.
        output: What the run prints: "lines", "bar" or "warnings".

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: The user made a mistake, for example in an option.
        KeyboardInterrupt: A stop signal arrived.
        Exception: Any exception of the method, the model or the data.
    """
    check_files(folder)
    remove_leftovers(folder)
    write_status(folder, "running")
    (folder / ERROR_FILE).unlink(missing_ok=True)
    gc_pause.resume()  # the command paused garbage collection while it was imported
    cfg = OmegaConf.create(dict(config))
    OmegaConf.set_readonly(cfg, value=True)
    with logged(folder, output), recorded(folder):
        from fedbench.simulation.simulator import run  # here: torch is slow to import

        broadcast_run((config, folder, resume))  # to the other processes of torchrun
        # classes: from a group to a class that was given in place of an option
        command_entries = {"command": command, "classes": named_classes(config)}
        summary = run(cfg, folder, resume, command_entries, output)
    sentence = paused(folder, summary) if summary["status"] == "paused" else ""
    write_status(folder, summary["status"], score_of(summary), sentence)
    return summary


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for every stop signal in the block, so that a run is saved before a scheduler kills it.

    At the end of the block, received signals are passed on to the previous handlers (core/signals.py).
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, as a signal handler, whatever the signal is."""
        raise KeyboardInterrupt

    with signals.handled(interrupt):
        yield


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record in status.json that the block was interrupted or failed, and raise the exception again.

    A failure is also written to error.txt.

    Args:
        folder: The run folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        record_interruption(folder)
        raise
    except (Exception, SystemExit) as error:  # a method that calls sys.exit() did not finish its run
        record_failure(folder, error)
        raise


def is_same_run(stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether two configurations have the same hash, so that they are of one run.

    Return False if the stored one lacks keys, because its file was truncated.
    """
    try:
        return config_hash(stored) == config_hash(config)
    except (KeyError, TypeError, AttributeError):
        return False
