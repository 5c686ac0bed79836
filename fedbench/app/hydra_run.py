"""What a single run and a sweep have in common: checks before Hydra runs, folders, and running Hydra itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedbench.app import jobs
from fedbench.app.compose import COMPLAINTS, CONFIG_NAME, VERSION_BASE, Composer, explain
from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import find_conf_dir
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import show


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit status, and the folder of its run, or those of a sweep's cells in their order."""

    exit: int
    folders: tuple[Path, ...] = ()


def compose_checked(composer: Composer, overrides: list[str]) -> DictConfig:
    """Hydra's full config of a run whose every value has been checked."""
    full = composer.compose(overrides)
    values = check(with_choices(full, full.hydra))
    fold, folds = values["fold"], values["folds"]
    require(fold == 0 or folds is not None, f"fold={fold} names one of the parts that folds=... makes: give folds, too")
    return full


def check_processes(full: DictConfig, words: list[str]) -> None:
    """Several processes need hardware=ddp, and hardware=ddp needs torchrun, which starts them."""
    started, shares_run = jobs.under_torchrun(), bool(full.hardware.get("ddp"))
    typed = " ".join(map(shlex.quote, words))
    require(
        started or not shares_run,
        "hardware=ddp is for the processes that torchrun starts: torchrun "
        f"--nproc-per-node=<number> -m fedbench {typed}",
    )
    size = os.environ.get("WORLD_SIZE", "1")
    require(
        shares_run or not started or size == "1",
        f"torchrun started {size} processes: add hardware=ddp, so that they share the run",
    )


def run_hydra(flags: list[str], overrides: list[str]) -> int:
    """Hand the command to hydra.main; returns its exit status.  Errors come as exceptions, not as text and exit."""
    main = hydra.main(config_path=str(find_conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
    argv, sys.argv = sys.argv, [sys.argv[0], *flags, *overrides]
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}), jobs.interruptible():
            return _status_of(main(jobs.run_cell))
    finally:
        sys.argv = argv


def _status_of(command: Callable[[], None]) -> int:
    """Return Hydra's exit status.  SystemExit of a launcher after a signal is raised outside of this."""
    try:
        command()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except COMPLAINTS as error:
        raise ConfigError(explain(error)) from error
    return 0


def make_folder(folder: Path, fresh: bool) -> Path:
    """Make a run's folder; ConfigError where it cannot be made or written into.

    fresh: under a name that nobody has, were two started in the same second.
    """
    names = (folder.with_name(f"{folder.name}-{k}") if k else folder for k in count())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not fresh:
            folder.mkdir(exist_ok=True)
        made = next(name for name in names if _is_made(name)) if fresh else folder
        require(os.access(made, os.W_OK), f"cannot write into {made}; set output_dir (sweep_dir for -m)")
        jobs.check_files(made)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot make {folder}: {why}; set output_dir (sweep_dir for -m)") from error
    return made


def _is_made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def folder_key(full: DictConfig, key: str) -> str:
    """A key that names a folder, as text; "" would be where the command is typed."""
    try:
        value = OmegaConf.select(full, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    require(bool(str(value or "").strip()), f"{key} must name a folder, got {show(value)}")
    return os.path.expanduser(str(value))


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
