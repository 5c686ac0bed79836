"""From the command line to runs: check everything, let Hydra run it, and say at the end how it went."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import configure_log
from omegaconf import DictConfig, flag_override, open_dict

from fedbench.app import jobs, resume
from fedbench.app.compose import Composer, quoted
from fedbench.app.hydra_run import (
    Outcome,
    check_processes,
    compose_checked,
    environment,
    folder_key,
    make_folder,
    run_hydra,
)
from fedbench.app.private_hydra import get_args_parser
from fedbench.app.sweep import sweep
from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.run_keys import RESERVED
from fedbench.core import caller
from fedbench.core.files import read_json
from fedbench.core.lock import Busy, writing
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import config_hash

REFUSED = ("--config-name", "--config-path", "--experimental-rerun")


@dataclass
class Command:
    """Hydra's flags, parsed and as typed; our overrides; the run directory of ``resume=``."""

    args: argparse.Namespace
    flags: list[str]
    overrides: list[str]
    resume: str | None


def launch(argv: list[str]) -> int:
    """Do what the command line says; returns the exit status, raises ConfigError for mistakes in it.

    Of the processes that torchrun starts, the first reads the command; the others take part in its runs.
    """
    with environment({jobs.TYPED: shlex.join(argv)}):
        if not jobs.under_torchrun():
            return run_command(argv)
        from fedbench.app.follow import take_part  # torch

        return take_part(lambda: run_command(argv))


def run_command(argv: list[str]) -> int:
    """Do what the command line says, in this process; returns the exit status."""
    return perform(argv).exit


def perform(argv: list[str]) -> Outcome:
    """Do what the command line says, in this process; ConfigError for mistakes in it."""
    command = parse_command(argv)
    args = command.args
    shows_config = args.cfg or args.info
    require(
        not (args.multirun and shows_config),
        "--cfg and --info show what one run would be: leave -m out, and give each key one value",
    )
    require(not args.package or args.cfg == "job", "--package shows a part of what --cfg job shows: add --cfg job")
    if os.getcwd() not in sys.path:  # the console script, too, finds a user's own module where it is started
        sys.path.append(os.getcwd())
    if args.shell_completion or args.hydra_help:
        return Outcome(run_hydra(command.flags, command.overrides))
    if command.resume:
        require(not args.multirun, "resume= is for one run: a sweep finds its unfinished cells by itself")
        require(
            not shows_config,
            "resume= goes on with a run, --cfg and --info show what one would be: leave one of them out",
        )
        return resume_run(Path(command.resume), command.overrides, args.config_dir)
    composer = Composer(args.config_dir)
    command.overrides = composer.expand(command.overrides)
    composer.refuse_repeated(command.overrides)
    if args.multirun:
        return sweep(composer, command.flags, command.overrides)
    full = compose_checked(composer, command.overrides)
    if shows_config:
        shown = run_hydra(command.flags, composer.rewrite(command.overrides))
        return Outcome(jobs.MISTAKE if shown else jobs.OK)
    if str(full.hydra.mode).endswith("MULTIRUN"):  # an experiment file may say so
        require(caller.current() is None, "hydra.mode=MULTIRUN asks for several runs: call fedbench.sweep")
        return sweep(composer, [*command.flags, "-m"], command.overrides)
    return run_single(composer, command, full)


def parse_command(argv: list[str]) -> Command:
    """Parse the command line, flags and overrides in any order; ConfigError for what cannot be read."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    for name in REFUSED:
        given = getattr(args, name[2:].replace("-", "_"))
        require(given is None, f"{name} is not used here: give a folder of your own with --config-dir")
    flags = list(argv)
    for text in args.overrides:
        flags.remove(text)
    if args.config_dir and args.config_dir.startswith("~"):
        path = os.path.expanduser(args.config_dir)
        flags = [text.replace(args.config_dir, path) if text.endswith(args.config_dir) else text for text in flags]
        args.config_dir = path
    # Read as typed: a run directory may hold characters that Hydra's grammar takes for its own.
    resumes = [text for text in args.overrides if text.lstrip("+").startswith("resume=")]
    paths = list(dict.fromkeys(text.split("=", 1)[1].strip("'\"") for text in resumes))
    require(len(paths) < 2, f"resume is given twice, in {' and in '.join(resumes)}: a command goes on with one run")
    overrides = _joined([text for text in args.overrides if text not in resumes])
    path = paths[-1] if paths and paths[-1] != "null" else None
    require(path != "", "resume= names no run directory (resume=null starts a new run)")
    return Command(args, flags, overrides, path and os.path.expanduser(path))


def _joined(words: list[str]) -> list[str]:
    """Return the words with lists joined that spaces have split (``seed=0, 1``)."""
    joined: list[str] = []
    for word in words:
        if joined and "=" in joined[-1] and "=" not in word and (joined[-1].endswith(",") or word.startswith(",")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; --help lists what there is")


def run_single(composer: Composer, command: Command, full: DictConfig) -> Outcome:
    """One run, in a folder of its own; no folder is left of a run that never began."""
    check_processes(full, [*command.flags, *command.overrides])
    is_named = any(text.lstrip("+").startswith("hydra.run.dir=") for text in command.overrides)
    path = Path(_run_dir(full))
    starts_again = jobs.under_torchrun() and not is_named
    if starts_again:
        path = _torchruns_folder(path.parent, check(with_choices(full, full.hydra)))
    existing = next(parent for parent in path.parents if parent.exists())
    folder = make_folder(path, fresh=not is_named and not starts_again)
    token = uuid.uuid4().hex
    extra = [f"hydra.run.dir={quoted(folder)}", f"+hydra.job.env_set.{jobs.TOKEN}={token}"]
    run_hydra(command.flags, [*composer.rewrite(command.overrides), *extra])
    status = _exit_of(folder, token)
    if status == jobs.MISTAKE and not is_named and not jobs.has_begun(folder):
        remove_folder(folder, existing)
        return Outcome(status)
    return Outcome(status, (folder,))


def _torchruns_folder(folder: Path, values: dict[str, Any]) -> Path:
    """Return the run folder of these torchrun processes, a new one beside finished runs.

    The folder is found again after a restart, because its name contains TORCHELASTIC_RUN_ID and a hash of the
    configuration.  Without --rdzv-id all commands have the id "none"; the host and torchrun's process id then
    distinguish them.
    """
    run_id = os.environ[jobs.TORCHRUN]
    agent = [socket.gethostname(), os.getppid()] if run_id in ("", "none") else []
    name = hashlib.sha256(json.dumps([run_id, *agent, config_hash(values)]).encode()).hexdigest()[:8]
    names = (folder / f"torchrun-{name}{f'-{k}' if k else ''}" for k in count())
    return next(path for path in names if read_json(path / "summary.json").get("status") != "finished")


def _run_dir(full: DictConfig) -> str:
    """hydra.run.dir, where ${hydra.runtime.choices.model} is what ran: a class of the user's own by its name."""
    ran, choices = with_choices(full, full.hydra).choices, full.hydra.runtime.choices
    with flag_override(choices, ["struct", "readonly"], [False, False]):
        choices.update({group: ran[group] for group in RESERVED})
    return folder_key(full, "hydra.run.dir")


def remove_folder(folder: Path, existing: Path) -> None:
    """Remove the folder of a run that never began, and the empty ones above it, up to the one that existed before."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents:
        if parent == existing:
            break
        with suppress(OSError):  # others have runs there
            parent.rmdir()


def resume_run(folder: Path, overrides: list[str], config_dir: str | None) -> Outcome:
    """resume=: go on with the run in a folder, without Hydra, which would make a new one."""
    resume.require_run(folder)
    try:
        with writing(folder):
            return Outcome(_resume_run(folder, overrides, config_dir), (folder,))
    except Busy as busy:
        jobs.tell(busy, str(busy))
        return Outcome(jobs.FAILED, (folder,))


def _resume_run(folder: Path, overrides: list[str], config_dir: str | None) -> int:
    values, finished = resume.prepare(folder, overrides, config_dir)
    values["hardware"]["ddp"] = jobs.under_torchrun()  # with as many processes as there are now
    if finished:
        jobs.skip(folder)
        return jobs.OK
    resume.record(folder, overrides)
    set_up_logging(folder)
    if notice := resume.hardware_kept(folder, values, overrides):
        jobs.say(notice)
    with environment({jobs.TOKEN: (token := uuid.uuid4().hex)}):
        jobs.attempt(folder, lambda: jobs.simulate(values, folder, resume=True))
    return _exit_of(folder, token)


def set_up_logging(folder: Path) -> None:
    """Set logging up as Hydra does for a run in this folder."""
    full = Composer().compose([])
    with open_dict(full.hydra):
        full.hydra.runtime.output_dir = str(folder.resolve())
    configure_log(full.hydra.job_logging)


def _exit_of(folder: Path, token: str) -> int:
    """The exit status that a run's status.json tells, if the command with this token wrote it."""
    status = read_json(folder / "status.json")
    return int(status.get("exit", jobs.FAILED)) if status.get("token") == token else jobs.FAILED
