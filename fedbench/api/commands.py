"""`fedbench.run`, `fedbench.sweep` and `fedbench.load`: the command line from Python, its words, checks and folders."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedbench.api import surroundings
from fedbench.api.runs import Run, Runs
from fedbench.api.words import words_of
from fedbench.app import jobs
from fedbench.app.hydra_run import Outcome, environment
from fedbench.app.launch import perform
from fedbench.core import caller
from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, RunError, require
from fedbench.core.streams import lasting
from fedbench.report.runs import find_runs

Folder = str | os.PathLike[str]


def run(*overrides: str, config_dir: Folder | None = None, resume: Folder | None = None, **values: Any) -> Run:
    """Run ``python -m fedbench`` with these overrides in this process; the run, finished, in the same folder.

    overrides: words of the command line, ``run("algorithm=pgfed dataset=digits", "rounds=5")``.  values: the same by
    key, ``run(algorithm="pgfed", rounds=5, local={"epochs": 2}, **{"algorithm.mu": 0.1})``; a class of one's own stands
    in the place of an option, ``model=my_module.MyNet``.  config_dir: options of one's own, as --config-dir.  resume: a
    run's folder, to go on with it.

    Raises ConfigError for a mistake, what a method raised where it failed, and KeyboardInterrupt where the run was
    stopped: it is saved, and goes on with ``run(resume=folder)``.
    """
    words = words_of(overrides, values)
    require(
        resume is None or os.fspath(resume) != "", "resume='' names no run directory (resume=None starts a new run)"
    )
    words += [f"resume={os.fspath(resume)}"] if resume is not None else []
    with caller.calling() as called:
        outcome = _perform([*words, *_flags(config_dir)])
    folder = outcome.folders[0] if outcome.folders else None
    if called.errors or outcome.exit != jobs.OK or folder is None:
        _raise(called.errors, folder)
    return Run(folder, _text(config_dir), own=True)


def sweep(*overrides: str, config_dir: Folder | None = None, launcher: str | None = None, **values: Any) -> Runs:
    """Run the cells of ``python -m fedbench -m`` with these overrides, one after the other, but for finished ones.

    As `run`; ``sweep("algorithm=fedavg,pgfed seed=0,1")`` is ``sweep(algorithm=["fedavg", "pgfed"], seed=[0, 1])``: of
    values, a list holds one for each run, and a value that itself is a list stands in another one.  launcher: one of
    hydra/launcher, such as together or joblib.

    A cell that fails does not stop the others: its Run says failed, and the printed table why.  Returns the cells that
    have begun, in their order.  Raises ConfigError for a mistake, KeyboardInterrupt where the sweep was stopped.
    """
    words = words_of(overrides, values, swept=True)
    words += [f"hydra/launcher={launcher}"] if launcher is not None else []
    outcome = _perform(["-m", *words, *_flags(config_dir)])
    if outcome.exit == jobs.INTERRUPTED:
        raise KeyboardInterrupt
    begun = [folder for folder in outcome.folders if (folder / "config.yaml").is_file()]
    return Runs([Run(folder, _text(config_dir), own=True) for folder in begun])


def load(folder: Folder, config_dir: Folder | None = None) -> Run | Runs:
    """The run in a folder, or the runs below it, a sweep's; ConfigError where there is none.

    config_dir: options of one's own that the runs were given.
    """
    path = Path(folder).expanduser()
    runs = find_runs([path])
    found = [Run(run.path, _text(config_dir)) for run in runs]
    return next((found[i] for i, run in enumerate(runs) if run.path == path), None) or Runs(found)


def _perform(words: list[str]) -> Outcome:
    require(
        not jobs.under_torchrun(),
        "several processes that torchrun started share the runs of a command line: torchrun ... -m fedbench",
    )
    with lasting(), surroundings.kept(), environment({jobs.TYPED: shlex.join(words)}):
        return perform(words)


def _raise(errors: Sequence[BaseException], folder: Path | None) -> NoReturn:
    """Raise what ended a run: a mistake as its sentence alone, anything else from where it was raised."""
    told = read_json(folder / "status.json").get("sentence") if folder is not None else None
    error = errors[-1] if errors else RunError(told or "the run has ended without a word")
    if isinstance(error, SystemExit):
        raise RunError(told) from error
    if isinstance(error, ConfigError):
        raise error.with_traceback(None) from None
    if folder is not None:
        error.add_note(f"the run's folder: {folder}")
    raise error


def _flags(config_dir: Folder | None) -> list[str]:
    return [] if config_dir is None else ["--config-dir", os.fspath(config_dir)]


def _text(config_dir: Folder | None) -> str | None:
    return None if config_dir is None else os.path.abspath(config_dir)
