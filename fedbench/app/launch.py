"""Parse a command line, and start a run, a sweep, a resumed run, or one of Hydra's information commands."""

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
from fedbench.app.json_result import print_result
from fedbench.app.loader import COMPLAINTS, VERSION_BASE, restore_hydra
from fedbench.app.paper_source import PaperSource, source_path
from fedbench.app.private_hydra import get_args_parser
from fedbench.app.single import FAILED, MISTAKE, OK, Attempt, attempt, check_processes, checked, new_folder
from fedbench.app.sweep import Swept, dry_run, sweep
from fedbench.config.conf_tree import conf_dirs, find_conf_dir
from fedbench.config.override_text import quoted
from fedbench.core.json_output import JSON_FLAG, output_on_stderr
from fedbench.core.lock import Busy, writing
from fedbench.core.options import ConfigError, require
from fedbench.simulation.log import Output, notice
from fedbench.simulation.processes import take_part, under_torchrun
from fedbench.simulation.simulate import Ended, simulate, skip, start
from fedbench.simulation.status import started_by
from fedbench.simulation.summary_text import ending

DRY_RUN = "--dry-run"
UNSUPPORTED = ("--config-name", "--config-path", "--experimental-rerun")  # flags of Hydra


@dataclass
class Command:
    """A parsed command line.

    Attributes:
        args: The values of Hydra's flags, of --quiet, --json and --dry-run.
        flags: The flags and their values as typed, for Hydra, which does not know --quiet, --json and --dry-run.
        overrides: The arguments that are not flags, without resume=.
        resume: The run folder of resume=; None without it.
        typed: The whole command as typed.
    """

    args: argparse.Namespace
    flags: list[str]
    overrides: list[str]
    resume: str | None
    typed: str


def launch(argv: list[str]) -> int:
    """Execute a command line.

    If torchrun started several processes, rank 0 executes the command, and the others take part in its runs.

    Args:
        argv: The arguments of ``python -m fedbench``.

    Returns:
        The exit status.

    Raises:
        ConfigError: The command has a mistake.
    """
    return take_part(lambda: run_command(argv)) if under_torchrun() else run_command(argv)


def run_command(argv: list[str]) -> int:
    """Execute ``python -m fedbench ARGV`` in this process, and return the exit status: 0 for success."""
    command = parse_command(argv)
    args = command.args
    shows_config = args.cfg or args.info
    require(
        not (args.multirun and shows_config),
        "--cfg and --info show the configuration of one run: remove -m, and give each key one value",
    )
    require(not args.package or args.cfg == "job", "--package selects a part of the output of --cfg job: add --cfg job")
    require(
        not (args.json and (shows_config or args.hydra_help)),
        "--json prints the results of a run as JSON, and --cfg, --info and --hydra-help start no run: remove --json",
    )
    if os.getcwd() not in sys.path:  # so that the console script finds modules in the working directory
        sys.path.append(os.getcwd())
    if args.dry_run:
        require(
            args.multirun and not args.json and not command.resume,
            "--dry-run lists what a sweep would do: use it with -m, and without --json and resume=",
        )
        composer = _expand_overrides(command)
        return dry_run(composer, command.overrides)
    if args.shell_completion or args.hydra_help:
        return ask_hydra(command)
    if shows_config:
        return show_config(command)
    if not args.json:
        return execute(command).status
    with output_on_stderr():
        result = execute(command)
    print_result(result)
    return result.status


def execute(command: Command) -> Attempt | Swept:
    """Start the runs of a command line: a sweep, a new run, or with resume=FOLDER an earlier run.

    Returns:
        A Swept with the results of a sweep, or an Attempt with that of a single run.
    """
    if command.resume:
        require(not command.args.multirun, "resume= is for one run; repeat the command of a sweep to resume its runs")
        return resume_run(Path(command.resume), command)
    composer = _expand_overrides(command)
    if command.args.multirun:
        return sweep(composer, command.overrides, command.typed, command.args.quiet)
    full = composer.compose(command.overrides)
    if str(full.hydra.mode).endswith("MULTIRUN"):  # set in an experiment file
        return sweep(composer, command.overrides, command.typed, command.args.quiet)
    return run_single(full, command)


def show_config(command: Command) -> int:
    """Print what --cfg or --info shows of a new run's configuration.

    Returns:
        The exit status: 0, or 2 after a mistake.
    """
    require(
        not command.resume,
        "resume= resumes a run, --cfg and --info show the configuration of a new one: remove one of them",
    )
    composer = _expand_overrides(command)
    full = composer.compose(command.overrides)
    checked(full, full.hydra)  # raises ConfigError for an invalid value, which Hydra would print
    command.overrides = composer.for_hydra(command.overrides)
    return MISTAKE if ask_hydra(command) else OK  # Hydra's status is not 0 for a mistake only


def _expand_overrides(command: Command) -> Composer:
    """Return an object that composes configurations with the command's --config-dir.

    The command's overrides are replaced in place (`Composer.expand`): glob(...) becomes a list of values, and
    hydra.sweeper.params={seed: "0,1"} becomes seed=0,1.
    """
    composer = Composer(command.args.config_dir)
    command.overrides = composer.expand(command.overrides)
    composer.refuse_repeated(command.overrides)
    return composer


def run_single(full: DictConfig, command: Command) -> Attempt:
    """Run a composed configuration in its folder, print the results, and return them.

    Args:
        full: The composed configuration, with its key hydra (Hydra's own options).
        command: The command line.
    """
    config = checked(full, full.hydra)
    check_processes(full, [*command.flags, *command.overrides])
    folder = new_folder(full, config)
    result = attempt(folder.path, lambda: start(config, folder.path, full.hydra, command.typed, _output(command)))
    if result.status == MISTAKE:  # an invalid option
        folder.remove_if_never_begun()
    if result.ended is not None and not result.ended.already:  # already: it was finished before this command
        ending(result.ended.summary, folder.path)  # prints the scores and the cost
    return result


def resume_run(folder: Path, command: Command) -> Attempt:
    """Resume the run in a folder, print the results, and return them.

    Args:
        folder: The run folder.
        command: The command line.
    """
    resume.require_run(folder)
    try:
        with writing(folder):  # raises Busy if another process writes into it
            result = attempt(folder, lambda: _resumed(folder, command))
    except Busy as busy:
        notice(str(busy))
        return Attempt(FAILED, folder, error=busy, reason=str(busy))
    if result.ended is not None and not result.ended.already:  # already: it was finished before this command
        ending(result.ended.summary, folder)  # prints the scores and the cost
    return result


def _resumed(folder: Path, command: Command) -> Ended:
    """Resume the run in a folder and return its result; a finished run is not repeated.

    Args:
        folder: The run folder.
        command: The command line.
    """
    config, finished = resume.prepare(folder, command.overrides, command.args.config_dir)
    if finished:
        return skip(folder)  # which prints that it is finished already, and returns its result
    config["hardware"]["ddp"] = under_torchrun()  # the number of processes may change
    resume.record(folder, command.overrides)
    if text := resume.unchanged_hardware(folder, config, command.overrides):
        notice(text)
    return Ended(simulate(config, folder, resume=True, command=command.typed, output=_output(command)))


def _output(command: Command) -> Output:
    """Return "warnings" with --quiet, so that a run prints only these, else "lines", which include progress."""
    return "warnings" if command.args.quiet else "lines"


def parse_command(argv: list[str]) -> Command:
    """Parse a command line, with flags and overrides in any order.

    Args:
        argv: The arguments of ``python -m fedbench``.

    Raises:
        ConfigError: A flag or its value is invalid.
    """
    parser = get_args_parser()
    parser.error = _raise_config_error  # type: ignore[method-assign]
    parser.add_argument("--quiet", "-q", action="store_true")
    parser.add_argument(JSON_FLAG, action="store_true")
    parser.add_argument(DRY_RUN, action="store_true", dest="dry_run")
    args = parser.parse_intermixed_args(argv)
    for name in UNSUPPORTED:  # flags of Hydra
        value = getattr(args, name[2:].replace("-", "_"))
        require(
            value is None,
            f"{name} is not supported: leave it out, or give the folder of your own configuration files by "
            "--config-dir",
        )
    # the flags that Hydra's own commands take
    flags = [argument for argument in argv if argument not in ("--quiet", "-q", JSON_FLAG, DRY_RUN)]
    for text in args.overrides:
        flags.remove(text)
    args.config_dir = args.config_dir and os.path.expanduser(args.config_dir)
    # Not parsed by Hydra: a path may contain characters of Hydra's grammar.
    resumes = [text for text in args.overrides if text.lstrip("+").startswith("resume=")]
    paths = list(dict.fromkeys(text.split("=", 1)[1].strip("'\"") for text in resumes))
    require(len(paths) < 2, f"resume is given twice, as {' and '.join(resumes)}: a command resumes one run")
    overrides = _join_lists([text for text in args.overrides if text not in resumes])
    path = paths[-1] if paths and paths[-1] != "null" else None
    require(path != "", "resume= is empty: give a run folder, as in resume=runs/my_run (resume=null starts a new run)")
    typed = f"{started_by()} {shlex.join(argv)}".rstrip()
    return Command(args, flags, overrides, path and os.path.expanduser(path), typed)


def ask_hydra(command: Command) -> int:
    """Let Hydra execute --cfg, --info, --hydra-help or shell completion, and return the exit status: 0 for success."""
    Plugins.instance().register(PaperSource)
    main = hydra.main(config_path=str(find_conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
    argv, sys.argv = sys.argv, [sys.argv[0], *command.flags, *_with_paper_tables(command)]  # which Hydra reads
    try:
        with restore_hydra():
            main(lambda config: None)()  # a task that does nothing: Hydra prints what the flags ask for
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except COMPLAINTS as error:
        raise ConfigError(explain(error)) from error
    finally:
        sys.argv = argv
    return OK


def _with_paper_tables(command: Command) -> list[str]:
    """Return the overrides of a command with one more, which adds the papers' tables to Hydra's search path.

    Their rows are experiments, which paper_source.py reads.
    """
    key = "hydra.searchpath"
    searchpath_overrides = [text for text in command.overrides if text.lstrip("+").startswith(f"{key}=")]
    values = [OverridesParser.create().parse_override(text).value() for text in searchpath_overrides]
    paths = [str(path) for value in values if isinstance(value, list) for path in value]
    searchpath = ",".join(map(quoted, [*paths, source_path(conf_dirs(command.args.config_dir))]))
    return [*(text for text in command.overrides if text not in searchpath_overrides), f"{key}=[{searchpath}]"]


def _join_lists(arguments: list[str]) -> list[str]:
    """Join arguments that the shell has split at spaces after a comma: ["seed=0,", "1"] becomes ["seed=0,1"]."""
    joined: list[str] = []
    for text in arguments:
        if joined and "=" in joined[-1] and "=" not in text and (joined[-1].endswith(",") or text.startswith(",")):
            joined[-1] += text
        else:
            joined.append(text)
    return joined


def _raise_config_error(message: str) -> NoReturn:
    """Raise ConfigError with a message of argparse, which itself would exit."""
    raise ConfigError(f"{message}; see --help")
