"""From the words of a command line to a run, a sweep, or one of Hydra's answers."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from fedbench.app import resume
from fedbench.app.compose import CONFIG_NAME, Composer, explain
from fedbench.app.loader import COMPLAINTS, VERSION_BASE, hydra_kept
from fedbench.app.paper_source import PaperSource, source_path
from fedbench.app.private_hydra import get_args_parser
from fedbench.app.single import FAILED, MISTAKE, OK, attempt, check_processes, checked, new_folder
from fedbench.app.sweep import sweep
from fedbench.config.conf_tree import conf_dirs, find_conf_dir
from fedbench.config.override_text import quoted
from fedbench.core.lock import Busy, writing
from fedbench.core.options import ConfigError, require
from fedbench.simulation.log import Output, notice
from fedbench.simulation.processes import take_part, under_torchrun
from fedbench.simulation.simulate import Ended, simulate, skip, start
from fedbench.simulation.status import started_by
from fedbench.simulation.summary_text import ending

REFUSED = ("--config-name", "--config-path", "--experimental-rerun")


@dataclass
class Command:
    """A parsed command line.

    Attributes:
        args: Hydra's flags, and --quiet.
        flags: The flags as typed, for Hydra.
        overrides: What is not a flag, without resume=.
        resume: The run directory of resume=; None without one.
        typed: The command as typed.
    """

    args: argparse.Namespace
    flags: list[str]
    overrides: list[str]
    resume: str | None
    typed: str


def launch(argv: list[str]) -> int:
    """Do what the command line asks for, and return the exit status.

    Of the processes that torchrun starts, the first reads the command; the others take part in its runs.

    Raises:
        ConfigError: A mistake in the command.
    """
    return take_part(lambda: run_command(argv)) if under_torchrun() else run_command(argv)


def run_command(argv: list[str]) -> int:
    """Do what the command line asks for in this process, and return the exit status."""
    command = parse_command(argv)
    args = command.args
    shows_config = args.cfg or args.info
    require(
        not (args.multirun and shows_config),
        "--cfg and --info show what one run would be: leave -m out, and give each key one value",
    )
    require(not args.package or args.cfg == "job", "--package shows a part of what --cfg job shows: add --cfg job")
    if os.getcwd() not in sys.path:  # the console script, too, finds the user's modules where it is started
        sys.path.append(os.getcwd())
    if args.shell_completion or args.hydra_help:
        return ask_hydra(command)
    if command.resume:
        require(not args.multirun, "resume= is for one run: a sweep finds its unfinished cells by itself")
        require(
            not shows_config,
            "resume= goes on with a run, --cfg and --info show what one would be: leave one of them out",
        )
        return resume_run(Path(command.resume), command)
    composer = Composer(args.config_dir)
    command.overrides = composer.expand(command.overrides)
    composer.refuse_repeated(command.overrides)
    if args.multirun:
        return sweep(composer, command.overrides, command.typed, args.quiet).status
    full = composer.compose(command.overrides)
    if shows_config:
        checked(full, full.hydra)
        command.overrides = composer.for_hydra(command.overrides)
        return MISTAKE if ask_hydra(command) else OK
    if str(full.hydra.mode).endswith("MULTIRUN"):  # an experiment file may ask for it
        return sweep(composer, command.overrides, command.typed, args.quiet).status
    return run_single(full, command)


def run_single(full: DictConfig, command: Command) -> int:
    """Run a composed configuration in its folder, print how it ended, and return the exit status."""
    config = checked(full, full.hydra)
    check_processes(full, [*command.flags, *command.overrides])
    folder = new_folder(full, config)
    status, ended = attempt(
        folder.path, lambda: start(config, folder.path, full.hydra, command.typed, _output(command))
    )
    if status == MISTAKE:
        folder.remove_if_never_begun()
    if ended is not None and not ended.already:
        ending(ended.summary, folder.path)
    return status


def resume_run(folder: Path, command: Command) -> int:
    """Resume the run in a folder, without composing a new one, and return the exit status."""
    resume.require_run(folder)
    try:
        with writing(folder):
            status, ended = attempt(folder, lambda: _resumed(folder, command))
    except Busy as busy:
        notice(str(busy))
        return FAILED
    if ended is not None and not ended.already:
        ending(ended.summary, folder)
    return status


def _resumed(folder: Path, command: Command) -> Ended:
    config, finished = resume.prepare(folder, command.overrides, command.args.config_dir)
    if finished:
        return skip(folder)
    config["hardware"]["ddp"] = under_torchrun()  # with as many processes as there are now
    resume.record(folder, command.overrides)
    if text := resume.hardware_kept(folder, config, command.overrides):
        notice(text)
    return Ended(simulate(config, folder, True, command.typed, _output(command)))


def _output(command: Command) -> Output:
    return "warnings" if command.args.quiet else "lines"


def parse_command(argv: list[str]) -> Command:
    """Parse the command line, flags and overrides in any order.

    Raises:
        ConfigError: A flag is unknown, or a value of it.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--quiet", "-q", action="store_true")
    args = parser.parse_intermixed_args(argv)
    for name in REFUSED:
        given = getattr(args, name[2:].replace("-", "_"))
        require(given is None, f"{name} is not used here: give a folder of your own with --config-dir")
    flags = [word for word in argv if word not in ("--quiet", "-q")]
    for text in args.overrides:
        flags.remove(text)
    args.config_dir = args.config_dir and os.path.expanduser(args.config_dir)
    # Read as typed: a run directory may hold characters that Hydra's grammar takes for its own.
    resumes = [text for text in args.overrides if text.lstrip("+").startswith("resume=")]
    paths = list(dict.fromkeys(text.split("=", 1)[1].strip("'\"") for text in resumes))
    require(len(paths) < 2, f"resume is given twice, in {' and in '.join(resumes)}: a command goes on with one run")
    overrides = _joined([text for text in args.overrides if text not in resumes])
    path = paths[-1] if paths and paths[-1] != "null" else None
    require(path != "", "resume= names no run directory (resume=null starts a new run)")
    typed = f"{started_by()} {shlex.join(argv)}".rstrip()
    return Command(args, flags, overrides, path and os.path.expanduser(path), typed)


def ask_hydra(command: Command) -> int:
    """Let Hydra answer --cfg, --info, --hydra-help or a shell's completion, and return its exit status."""
    Plugins.instance().register(PaperSource)
    answer = hydra.main(config_path=str(find_conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
    argv, sys.argv = sys.argv, [sys.argv[0], *command.flags, *_with_rows(command)]
    try:
        with hydra_kept():
            answer(lambda config: None)()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except COMPLAINTS as error:
        raise ConfigError(explain(error)) from error
    finally:
        sys.argv = argv
    return OK


def _with_rows(command: Command) -> list[str]:
    """Return the overrides with the rows of printed tables in Hydra's search path, after its folders."""
    key = "hydra.searchpath"
    given = [text for text in command.overrides if text.lstrip("+").startswith(f"{key}=")]
    values = [OverridesParser.create().parse_override(text).value() for text in given]
    paths = [str(path) for value in values if isinstance(value, list) for path in value]
    searchpath = ",".join(map(quoted, [*paths, source_path(conf_dirs(command.args.config_dir))]))
    return [*(text for text in command.overrides if text not in given), f"{key}=[{searchpath}]"]


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
