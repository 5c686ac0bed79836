"""Run a sweep: check its runs, start them by Hydra's launcher, and print a table of their results."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from fedbench.app.compose import Composer, explain
from fedbench.app.dry_run import plan_of, show_plan
from fedbench.app.loader import restore_hydra
from fedbench.app.private_hydra import Callbacks
from fedbench.app.single import FAILED, INTERRUPTED, OK, attempt, check_processes, checked, folder_key, make_folder
from fedbench.app.sweep_table import DONE, outcomes, show_table, stamps
from fedbench.config.override_text import quoted
from fedbench.core.broken_pipe import survive_broken_pipe
from fedbench.core.lock import writing
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import UNHASHED_KEYS, is_matched
from fedbench.core.suggest import suggested
from fedbench.simulation.log import notice
from fedbench.simulation.processes import under_torchrun
from fedbench.simulation.result import has_validation, primary_of, score_of
from fedbench.simulation.simulate import Ended, interruptible, recorded, start
from fedbench.simulation.summary_text import ending_line

BASIC = "BasicSweeper"  # Hydra's default sweeper, which knows all runs in advance and uses no scores
DEFAULT_FOLDER = "sweeps"  # sweep_dir in conf/config.yaml, shared by different sweeps
MAX_CHECKED_RUNS = 64  # in a larger sweep, only one run per swept value is checked in advance ...
ENDS = 8  # ... and of a long list of values only this many at either end
SECONDS_AT_FIRST, SECONDS_BETWEEN = 1.0, 5.0  # before the first progress line of the checks, and between lines
Item = TypeVar("Item")


class Swept(NamedTuple):
    """The result of a sweep.

    Attributes:
        status: The exit status.
        folder: Its folder.
        rows: For each run, a dict with run (its folder), status, score and sentence.
    """

    status: int
    folder: Path
    rows: list[dict[str, Any]]

    @property
    def folders(self) -> list[Path]:
        """The paths of the run folders, one for each item of `rows`, in the same order."""
        return [self.folder / row["run"] for row in self.rows]


@dataclass(frozen=True)
class RunTask:
    """The function that Hydra's launchers call for each run of a sweep, possibly in another process.

    Attributes:
        command: The command of the sweep as typed.
        total: The number of runs; None if only the sweeper knows it.
        scored: Whether the sweeper uses the scores.
        quiet: Whether to print only warnings.
        group: The value of tracking.group, unless the user set it.
    """

    command: str
    total: int | None
    scored: bool
    quiet: bool
    group: str

    @survive_broken_pipe()
    def __call__(self, cfg: DictConfig) -> float:
        """Run a composed configuration, and return its score for a sweeper that optimizes, such as Optuna's.

        Returns:
            The best validation score, or without validation samples the last test score; NaN if the run failed.
        """
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        ended = attempt(folder, lambda: self._run(cfg, hydra, folder)).ended
        if ended is None:
            return math.nan
        if not ended.already and not self.quiet:
            of = f" of {self.total}" if self.total else ""
            print(f"run {hydra.job.num + 1}{of}: {ending_line(ended.summary, folder)}", flush=True)
        score = score_of(ended.summary)
        if self.scored and not math.isnan(score):
            _print_score(folder, ended.summary, score)
        return score

    def _run(self, cfg: DictConfig, hydra: Any, folder: Path) -> Ended:
        """Check a composed configuration, and start, resume or skip its run.

        Args:
            cfg: The configuration.
            hydra: The value of the configuration's key hydra.
            folder: The run folder.
        """
        with writing(folder), recorded(folder):  # locks the folder, and writes an error to its status.json
            config = checked(cfg, hydra)
        # the group of all runs of this sweep in W&B, unless the user set one
        config["tracking"]["group"] = config["tracking"]["group"] or self.group or None
        shows_bar = _one_by_one(hydra) and not self.quiet
        return start(config, folder, hydra, self.command, "bar" if shows_bar else "warnings")


def sweep(composer: Composer, overrides: list[str], command: str, quiet: bool = False) -> Swept:
    """Run a sweep by Hydra's sweeper and launcher, skipping finished runs.

    Args:
        composer: Composes the configurations.
        overrides: The overrides, with several values for some keys.
        command: The command as typed.
        quiet: Whether to print only warnings and the final table.

    Returns:
        The exit status, the folder, and the status of each run.

    Raises:
        ConfigError: The command has a mistake, and no run has begun.
    """
    with restore_hydra():
        master = composer.compose(overrides, multirun=True)
        sweeper = str(master.hydra.sweeper._target_)
        require(
            _one_by_one(master.hydra) or not under_torchrun(),
            "under torchrun the runs of a sweep run one after the other, each in all processes: remove hydra/launcher",
        )
        # Hydra's basic sweeper knows all runs in advance; others choose the next ones by the scores of earlier ones
        scored = not sweeper.endswith(BASIC)
        runs = [] if scored else composer.run_overrides(_with_params(master, overrides))
        parsed = composer.parse(_with_params(master, overrides))
        name_run_folders(master, [override.key_or_group for override in parsed if override.is_sweep_override()])
        planned = check_runs(composer, master, runs, overrides)
        folder = make_folder(Path(folder_key(master, "hydra.sweep.dir")), fresh=False)
        with open_dict(master.hydra):
            master.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(folder))}")  # with ~ expanded
            master.hydra.sweep.dir = str(folder)
        before = stamps(folder)  # of the status files, by which outcomes() sees which runs were started
        task = RunTask(command, total=len(runs) or None, scored=scored, quiet=quiet, group=_group(parsed, folder))
        interrupted, stopped = _start_runs(composer, master, task)
    rows = outcomes(folder, before, planned)
    if isinstance(stopped, ConfigError) and all(row["status"] == "not started" for row in rows):
        raise stopped  # a mistake in the command
    if stopped is not None:
        notice(f"the sweep stopped: {explain(stopped)}")
    show_table(rows, folder)
    report = suggested(f"python -m fedbench report {shlex.quote(str(folder))}")
    print(f"tables with mean and spread over seeds: {report}", flush=True)
    failed = not rows or any(row["status"] not in DONE for row in rows)
    status = INTERRUPTED if interrupted else FAILED if failed else OK
    return Swept(status, folder, rows)


def dry_run(composer: Composer, overrides: list[str]) -> int:
    """Print what a sweep would do with each of its runs, without starting one, and return the exit status.

    Args:
        composer: Composes the configurations.
        overrides: The overrides, with several values for some keys.

    Raises:
        ConfigError: A value is invalid, or the sweeper proposes runs by scores, so that they are not known.
    """
    with restore_hydra():
        master = composer.compose(overrides, multirun=True)
        sweeper = str(master.hydra.sweeper._target_)
        require(  # BASIC: Hydra's sweeper that knows all runs in advance
            sweeper.endswith(BASIC),
            f"--dry-run lists the runs of a sweep, but hydra/sweeper proposes them during the sweep ({sweeper}): "
            "remove --dry-run or hydra/sweeper",
        )
        overrides = _with_params(master, overrides)
        name_run_folders(master, [o.key_or_group for o in composer.parse(overrides) if o.is_sweep_override()])
        folder = Path(folder_key(master, "hydra.sweep.dir"))
        planned = []
        for number, run in enumerate(with_progress(composer.run_overrides(overrides), "runs")):
            full = _with_number(composer.compose_run(master, run), number)
            name = folder_key(full, "hydra.sweep.subdir")
            planned.append(plan_of(folder / name, name, checked(full, full.hydra)))
    show_plan(planned)
    return OK


def _with_number(full: DictConfig, number: int) -> DictConfig:
    """Set hydra.job.num to a run's number, and hydra.job.id to "<name of the job>_<number>", in place, as launchers do.

    Returns:
        The configuration itself.
    """
    with open_dict(full.hydra.job):
        full.hydra.job.num, full.hydra.job.id = number, f"{full.hydra.job.name}_{number}"
    return full


def _one_by_one(hydra: Any) -> bool:
    """Return whether runs start in this process, one after the other: the launcher is Hydra's BasicLauncher.

    Args:
        hydra: The value of the key hydra in the sweep's configuration.
    """
    return str(hydra.launcher._target_).endswith("BasicLauncher")


def _start_runs(composer: Composer, master: DictConfig, task: RunTask) -> tuple[bool, Exception | None]:
    """Start the runs of a sweep by Hydra's sweeper and launcher, and wait until all have ended.

    Args:
        composer: Composes the configurations.
        master: The configuration of the sweep, with its key hydra (Hydra's own options).
        task: The function that the launcher calls for each run.

    Returns:
        Whether they were interrupted, and the exception that stopped the sweeper or launcher, if any.
    """
    callbacks = Callbacks(master)
    context = HydraContext(config_loader=composer.loader, callbacks=callbacks)
    arguments: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
    try:
        with interruptible():
            callbacks.on_multirun_start(config=master, config_name=master.hydra.job.config_name)
            sweeper = Plugins.instance().instantiate_sweeper(config=master, hydra_context=context, task_function=task)
            sweeper.sweep(arguments=arguments)
            callbacks.on_multirun_end(config=master, config_name=master.hydra.job.config_name)
    except KeyboardInterrupt:
        return True, None
    except Exception as error:  # of the launcher: failures of runs are in their status files
        return False, error
    return False, None


def _with_params(master: DictConfig, overrides: list[str]) -> list[str]:
    """Return the overrides that hydra.sweeper.params adds to a sweep, as "key=values", followed by ``overrides``.

    Args:
        master: The configuration of the sweep, with its key hydra (Hydra's own options).
        overrides: The overrides of the command.
    """
    params = master.hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *overrides]


def name_run_folders(master: DictConfig, swept: list[str]) -> None:
    """Make Hydra use the swept keys in the names of the run folders, even if they are normally excluded.

    UNHASHED_KEYS are patterns of the keys that are excluded, because they do not change the results.

    Args:
        master: The configuration of the sweep; the overrides under its key hydra are extended in place.
        swept: The keys with several values.
    """
    naming: list[str] = []
    hidden = [key for key in swept if is_matched(key, UNHASHED_KEYS)]
    excluded = [pattern for pattern in UNHASHED_KEYS if not any(is_matched(key, [pattern]) for key in hidden)]
    if hidden:
        naming.append(f"hydra.job.config.override_dirname.exclude_keys={_listed(excluded)}")
    sweep: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    subdir = str(sweep["subdir"])
    # the default is a call of the resolver cell_name, which gets the sweep's folder and the swept keys as arguments
    if subdir.startswith("${cell_name:") and subdir.endswith("}"):
        naming.append(f'hydra.sweep.subdir="{subdir[:-1]},${{hydra.sweep.dir}},{_listed(swept)}}}"')
    with open_dict(master.hydra):
        master.hydra.overrides.hydra.extend(naming)  # the launcher composes each run with these


def _group(overrides: list[Override], folder: Path) -> str:
    """Return the value of tracking.group, which groups the runs of a sweep in W&B.

    It is the name of the folder.  The default folder may have several sweeps, so that it is the overrides instead,
    without the values of swept keys.

    Args:
        overrides: The overrides of the sweep.
        folder: The folder of the sweep.
    """
    if folder.absolute().name != DEFAULT_FOLDER:
        return folder.absolute().name
    naming = [
        override for override in overrides
        if not override.is_hydra_override() and not is_matched(override.key_or_group, UNHASHED_KEYS)
    ]  # fmt: skip
    texts = [
        override.key_or_group if override.is_sweep_override() else str(override.input_line).lstrip("+")
        for override in naming
    ]
    return ",".join(sorted(texts))


def _listed(names: list[str]) -> str:
    """Return the names as text in Hydra's grammar: a list of quoted texts, ``['a','b']``."""
    return f"[{','.join(map(repr, names))}]"


def check_runs(composer: Composer, master: DictConfig, runs: list[list[str]], overrides: list[str]) -> list[str]:
    """Check the configurations of a sweep before any run starts.

    In a large sweep only some are checked now.  Each is checked again when it runs.

    Args:
        composer: Composes the configurations.
        master: The configuration of the sweep, with its key hydra (Hydra's own options).
        runs: The overrides of each run.
        overrides: The overrides of the sweep.

    Returns:
        The names of the run folders; [] for a large sweep.

    Raises:
        ConfigError: A value is invalid, or two runs are the same.
    """
    checks_all = len(runs) <= MAX_CHECKED_RUNS
    # a few runs that together have each swept value, checked first so that a wrong value is found early
    first = _each_value(runs) if runs else []
    to_check = list(dict.fromkeys(map(tuple, [*first, *runs] if checks_all else first)))  # each run once
    names: dict[tuple[str, ...], str] = {}
    items = "runs" if checks_all else f"swept values of {len(runs)} runs"
    for number, run in enumerate(with_progress(to_check, items)):
        full = _with_number(composer.compose_run(master, list(run)), number)
        checked(full, full.hydra)
        check_processes(full, ["-m", *overrides])
        names[run] = folder_key(full, "hydra.sweep.subdir")
    planned = [names[tuple(run)] for run in runs] if checks_all else []
    twice = next((name for name in planned if planned.count(name) > 1), None)
    require(twice is None, f"this sweep has the same run twice, {twice}: remove repeated values")
    return planned


def with_progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items, and print the progress every few seconds.

    Args:
        items: The items.
        what: Their name in the line, such as "runs".
    """
    # in the past, so that the first line comes after SECONDS_AT_FIRST
    last_printed = time.monotonic() - SECONDS_BETWEEN + SECONDS_AT_FIRST
    for i, item in enumerate(items):
        if time.monotonic() - last_printed >= SECONDS_BETWEEN:
            print(f"checking the {what} before the sweep starts: {i} of {len(items)} done", flush=True)
            last_printed = time.monotonic()
        yield item


def _each_value(runs: list[list[str]]) -> list[list[str]]:
    """Return a few runs of a sweep that together have every swept value, or the ends of a long list of values.

    The first run has the first value of each key.  Each further run differs from it in one key.

    Args:
        runs: The overrides of each run, in the same order of keys; at least one run.
    """
    columns = [list(dict.fromkeys(column)) for column in zip(*runs)]
    first = [column[0] for column in columns]
    others = [
        [*first[:i], value, *first[i + 1 :]]
        for i, column in enumerate(columns)
        for value in column[1:]
        if value in (*column[:ENDS], *column[-ENDS:])  # of a list longer than 2 ENDS, only these values
    ]
    return [first, *others]


def _print_score(folder: Path, summary: dict[str, Any], score: float) -> None:
    """Print the score that is returned to a sweeper, and what it is.

    Args:
        folder: The run folder.
        summary: The content of summary.json.
        score: The score.
    """
    name = primary_of(summary)
    description = f"the best validation {name}"
    if not has_validation(summary):
        description = (
            f"the test {name} of the last round, because there are no validation samples (dataset.val_fraction)"
        )
    print(f"{folder.name}: score for the sweeper {score:.4f}, {description}", flush=True)
