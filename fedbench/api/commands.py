"""`fedbench.run`, `fedbench.sweep` and `fedbench.load`: the Python interface, with the checks of the command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fedbench.api.runs import Run, Runs
from fedbench.api.values import choices_and_values, split_overrides, sweep_overrides, value_text
from fedbench.app import resume as resuming
from fedbench.app.compose import Composer
from fedbench.app.single import INTERRUPTED, check_processes, checked, new_folder
from fedbench.app.sweep import sweep as run_sweep
from fedbench.core.broken_pipe import survive_broken_pipe
from fedbench.core.lock import writing
from fedbench.core.options import ConfigError, RunError, require
from fedbench.report.runs import find_runs
from fedbench.simulation.log import notice
from fedbench.simulation.processes import under_torchrun
from fedbench.simulation.run_folder import is_resumable
from fedbench.simulation.simulate import interruptible, simulate, start
from fedbench.simulation.status import needed_to_resume, sentence_of, started_by

Folder = str | os.PathLike[str]


def run(*overrides: str, config_dir: Folder | None = None, resume: Folder | None = None, **values: Any) -> Run:
    """Run one experiment in this process, like ``python -m fedbench``.

    Args:
        *overrides: Arguments of the command line, as in ``run("algorithm=pgfed dataset=digits", "rounds=5")``.
        config_dir: A folder with your own options, like --config-dir.
        resume: The folder of a run to resume.
        **values: Options by name, as in ``run(algorithm="pgfed", rounds=5, local={"epochs": 2}, **{"algorithm.mu":
            0.1})``.  Instead of a name, a group may have a class itself, as in ``model=MyNet`` (no text).

    Returns:
        The finished run.

    Raises:
        ConfigError: An option is invalid, or the run cannot be resumed.
        KeyboardInterrupt: The run was interrupted.  It is saved; resume it with ``run(resume=folder)``.
        Exception: Any exception of the method, the model or the data.
    """
    # choices: overrides that choose options of groups; other_values: all other values by dotted key
    arguments, (choices, other_values) = split_overrides(overrides), choices_and_values(values)
    resumes = [argument for argument in arguments if argument.startswith("resume=")]
    require(len(resumes) < 2, f"resume is given twice, as {' and '.join(resumes)}: give one run folder per call")
    if resumes and resume is None:
        arguments = [argument for argument in arguments if argument not in resumes]
        path = resumes[0].removeprefix("resume=")
        resume = None if path == "null" else path
    composer = Composer(_absolute_path(config_dir))
    with _in_process():
        if resume is not None:
            require(os.fspath(resume) != "", "resume must be a run folder, got '' (resume=None starts a new run)")
            return _resume(composer, Path(resume).expanduser(), [*arguments, *choices, *_as_overrides(other_values)])
        full = _composed(composer, [*arguments, *choices], other_values)
        config = checked(full, full.hydra)
        check_processes(full, [*arguments, *choices, *_as_overrides(other_values)])
        folder = new_folder(full, config)
        command = _typed([*arguments, *choices, *_as_overrides(other_values)])
        try:
            with _clear_errors(folder.path):
                start(config, folder.path, full.hydra, command)
        except ConfigError as error:
            if type(error) is ConfigError:  # an invalid option; a RunError is of a run that began, whose folder stays
                folder.remove_if_never_begun()
            raise
    return Run(folder.path, _absolute_path(config_dir), ran_here=True)


def sweep(*overrides: str, config_dir: Folder | None = None, launcher: str | None = None, **values: Any) -> Runs:
    """Run a sweep, like ``python -m fedbench -m``.  Finished runs are not repeated.

    Args:
        *overrides: Arguments of the command line, with several values of some options, as in
            ``sweep("algorithm=fedavg,pgfed seed=0,1")``.
        config_dir: A folder with your own options, like --config-dir.
        launcher: An option of hydra/launcher, such as "joblib".
        **values: Options by name.  A list has the values of several runs, as in ``sweep(algorithm=["fedavg", "pgfed"],
            seed=[0, 1])``.  Write [[1, 2]] for one value that is a list.

    Returns:
        The runs that have begun, in their order.  A failed run has the status "failed", and does not stop the others.

    Raises:
        ConfigError: An option is invalid.
        KeyboardInterrupt: The sweep was interrupted.
    """
    arguments = [*split_overrides(overrides), *sweep_overrides(values)]
    arguments += [f"hydra/launcher={launcher}"] if launcher is not None else []
    composer = Composer(_absolute_path(config_dir))
    with _in_process():
        arguments = composer.expand(arguments)
        composer.refuse_repeated(arguments)
        swept = run_sweep(composer, arguments, _typed(["-m", *arguments]))
    if swept.status == INTERRUPTED:
        raise KeyboardInterrupt
    begun = [folder for folder in swept.folders if (folder / "config.yaml").is_file()]
    return Runs([Run(folder, _absolute_path(config_dir), ran_here=True) for folder in begun])


def load(folder: Folder, config_dir: Folder | None = None) -> Run | Runs:
    """Return the run in a folder, or all runs below it if the folder itself is not a run.

    Args:
        folder: The folder of a run, of a sweep, or any folder above.
        config_dir: The --config-dir of the runs, a folder with your own options.

    Raises:
        ConfigError: There is no run.
    """
    path = Path(folder).expanduser()
    runs = find_runs([path])
    results = [Run(run.path, _absolute_path(config_dir)) for run in runs]
    return next((results[i] for i, run in enumerate(runs) if run.path == path), None) or Runs(results)


def _composed(composer: Composer, arguments: list[str], values: Mapping[str, Any]) -> DictConfig:
    """Compose the configuration of a run.

    Args:
        composer: Composes configurations.
        arguments: Overrides.
        values: Values by dotted key, which need not be written as overrides.

    Returns:
        The configuration, unchecked, with its key hydra (Hydra's own options).

    Raises:
        ConfigError: A key is given twice, or an override is invalid or for several runs.
    """
    arguments = composer.expand(arguments)
    composer.refuse_repeated(arguments)
    named = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    twice = next((key for key in values if key in named), None)
    require(twice is None, f"{twice} is given twice, as text and as a value: remove one of them")
    full = composer.compose([*arguments, *_hydra_overrides(values)])
    require(
        not str(full.hydra.mode).endswith("MULTIRUN"),
        "hydra.mode=MULTIRUN is for several runs, but fedbench.run starts one: use fedbench.sweep",
    )
    with open_dict(full):
        for key, value in values.items():
            if not key.startswith("hydra."):
                OmegaConf.update(full, key, value, merge=True, force_add=True)
        # Hydra lists the overrides of a run without those of hydra itself, as for the command line.
        full.hydra.overrides.task.extend(_as_overrides({k: v for k, v in values.items() if not k.startswith("hydra.")}))
    return full


def _hydra_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values of keys hydra.* as overrides, which Hydra needs when it composes the configuration.

    Args:
        values: Values by dotted key.  Other keys are omitted.
    """
    return _as_overrides({key: value for key, value in values.items() if key.startswith("hydra.")})


def _as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return {dotted key: value} as overrides in Hydra's grammar, such as ["algorithm.mu=0.1"]."""
    return [f"{key}={value_text(key, value)}" for key, value in values.items()]


def _resume(composer: Composer, folder: Path, arguments: list[str]) -> Run:
    """Resume the run in a folder unless it is finished, and return it.

    Args:
        composer: Composes configurations, and has the folder of the user's own options.
        folder: The run folder.
        arguments: The overrides of the call.
    """
    config_dir = None if composer.config_dir is None else str(composer.config_dir)
    resuming.require_run(folder)
    with writing(folder), _clear_errors(folder):
        config, finished = resuming.prepare(folder, arguments, config_dir)
        if not finished:
            resuming.record(folder, arguments)
            simulate(config, folder, resume=True, command=_typed([f"resume={folder}", *arguments]))
    return Run(folder, config_dir, ran_here=True)


@contextmanager
def _in_process() -> Iterator[None]:
    """Prepare this process for runs in the block.

    In the block, the working directory is in sys.path, and stop signals raise KeyboardInterrupt.  Output into a closed
    pipe is discarded.

    Raises:
        ConfigError: The process was started by torchrun.
    """
    require(
        not under_torchrun(),
        "fedbench.run and fedbench.sweep do not support torchrun: use the command line, torchrun ... -m fedbench",
    )
    path = sys.path[:]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with survive_broken_pipe(), interruptible():
            yield
    finally:
        sys.path[:] = path


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Raise the exceptions of a run in a form that is useful in Python.

    A ConfigError loses its traceback.  SystemExit, of a method that calls sys.exit(), becomes a RunError.  Other
    exceptions get a note with the run folder.

    Args:
        folder: The run folder.
    """
    try:
        yield
    except ConfigError as error:
        raise error.with_traceback(None) from None
    except KeyboardInterrupt:
        if is_resumable(folder):
            notice(f"interrupted; it is saved; resume it with: {resume_call(folder)}")
        raise
    except SystemExit as error:
        raise RunError(sentence_of(error, folder)) from error
    except Exception as error:
        error.add_note(f"run folder: {folder}")
        raise


def resume_call(folder: Path) -> str:
    """Return the Python call that resumes the run in a folder, as in "fedbench.run(resume='runs/x')"."""
    config_dir, arguments = needed_to_resume(folder)
    values = {"config_dir": config_dir, "resume": str(folder)}
    named = [f"{name}={value!r}" for name, value in values.items() if value is not None]
    return f"fedbench.run({', '.join([*map(repr, arguments), *named])})"


def _typed(arguments: Sequence[str]) -> str:
    """Return the shell command that does the same as a call from Python, for summary.json.

    Args:
        arguments: The arguments of the command, such as ["rounds=2"] for "python -m fedbench rounds=2".
    """
    return f"{started_by()} {shlex.join(arguments)}".rstrip()


def _absolute_path(config_dir: Folder | None) -> str | None:
    """Return the absolute path of the folder ``config_dir`` as text; None if it is None."""
    return None if config_dir is None else os.path.abspath(config_dir)
