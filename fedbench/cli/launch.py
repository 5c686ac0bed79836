"""From the command line to runs: check everything, let Hydra run it, and say at the end how it went."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedbench.cli import jobs, resume
from fedbench.cli.compose import COMPLAINTS, CONFIG_NAME, VERSION_BASE, Composer, explain
from fedbench.cli.conf_tree import find_conf_dir
from fedbench.cli.config import RESERVED, check, with_choices
from fedbench.core.lock import Busy, held, holder, writing
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import WHEREABOUTS, is_matched, show

MOST_CELLS = 64  # more than that are checked one swept value at a time ...
ENDS = 8  # ... and of a long list of values these many at either end: cells check themselves again
ABSENT = {"status": "not started", "score": None, "sentence": ""}
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
    with _environment({jobs.TYPED: shlex.join(argv)}):
        if jobs.TORCHRUN not in os.environ:
            return obey(argv)
        from fedbench.cli.follow import take_part  # torch

        return take_part(lambda: obey(argv))


def obey(argv: list[str]) -> int:
    """Do what the command line says."""
    command = read(argv)
    args = command.args
    asked = args.cfg or args.info
    require(not args.package or args.cfg == "job", "--package shows a part of what --cfg job shows: add --cfg job")
    if os.getcwd() not in sys.path:  # the console script, too, finds a user's own module where it is started
        sys.path.append(os.getcwd())
    if args.shell_completion or args.hydra_help:
        return through(command.flags, command.overrides)
    if command.resume:
        require(not args.multirun, "resume= is for one run: a sweep finds its unfinished cells by itself")
        require(not asked, "resume= goes on with a run, --cfg and --info show what one would be: leave one of them out")
        return go_on(Path(command.resume), command.overrides, args.config_dir)
    composer = Composer(args.config_dir)
    composer.refuse_repeated(command.overrides)
    command.overrides = composer.expand(command.overrides)
    if args.multirun and not asked:
        return sweep(composer, command)
    full = checked(composer, command.overrides)
    if asked:
        return jobs.MISTAKE if through(command.flags, composer.rewrite(command.overrides)) else jobs.OK
    if str(full.hydra.mode).endswith("MULTIRUN"):  # an experiment file may say so
        return sweep(composer, command)
    return single(composer, command, full)


def read(argv: list[str]) -> Command:
    """Parse the command line; flags and overrides may come in any order."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    for name in REFUSED:
        given = getattr(args, name[2:].replace("-", "_"))
        require(given is None, f"{name} is not used here: give a folder of your own with --config-dir")
    flags = list(argv)
    for text in args.overrides:
        flags.remove(text)
    # Read as typed: a run directory may hold characters that Hydra's grammar takes for its own.
    said = [text for text in args.overrides if text.lstrip("+").startswith("resume=")]
    paths = list(dict.fromkeys(text.split("=", 1)[1].strip("'\"") for text in said))
    require(len(paths) < 2, f"resume is given twice, in {' and in '.join(said)}: a command goes on with one run")
    overrides = [text for text in args.overrides if text not in said]
    path = paths[-1] if paths and paths[-1] != "null" else None
    require(path != "", "resume= names no run directory (resume=null starts a new run)")
    return Command(args, flags, overrides, path)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; --help lists what there is")


def checked(composer: Composer, overrides: list[str]) -> DictConfig:
    """Hydra's full config of a run whose every value has been checked."""
    full = composer.compose(overrides)
    check(with_choices(full, full.hydra))
    return full


def check_processes(full: DictConfig, words: list[str]) -> None:
    """Several processes need hardware=ddp, and hardware=ddp needs torchrun, which starts them."""
    started, wanted = jobs.TORCHRUN in os.environ, bool(full.hardware.get("ddp"))
    typed = " ".join(map(shlex.quote, words))
    require(started or not wanted, "hardware=ddp is for the processes that torchrun starts: torchrun "
            f"--nproc-per-node=<number> -m fedbench {typed}")
    size = os.environ.get("WORLD_SIZE", "1")
    require(wanted or not started or size == "1",
            f"torchrun started {size} processes: add hardware=ddp, so that they share the run")


def single(composer: Composer, command: Command, full: DictConfig) -> int:
    """One run, in a folder of its own."""
    check_processes(full, [*command.flags, *command.overrides])
    own = any(text.lstrip("+").startswith("hydra.run.dir=") for text in command.overrides)
    wanted = Path(_run_dir(full))
    there = next(parent for parent in wanted.parents if parent.exists())
    folder = make_folder(wanted, fresh=not own)
    token = uuid.uuid4().hex
    extra = [f"hydra.run.dir={_quoted(folder)}", f"+hydra.job.env_set.{jobs.TOKEN}={token}"]
    through(command.flags, [*composer.rewrite(command.overrides), *extra])
    status = _exit_of(folder, token)
    if status == jobs.MISTAKE and not own and not jobs.began(folder):
        remove(folder, there)
    return status


def _run_dir(full: DictConfig) -> str:
    """hydra.run.dir, where ${hydra.runtime.choices.model} is what ran: a class of the user's own by its name."""
    named, choices = with_choices(full, full.hydra).choices, full.hydra.runtime.choices
    with flag_override(choices, ["struct", "readonly"], [False, False]):
        choices.update({group: named[group] for group in RESERVED})
    return _select(full, "hydra.run.dir")


def remove(folder: Path, there: Path) -> None:
    """Take away the folder of a run that never began, and what was made above it: all that is below ``there``."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents:
        if parent == there:
            break
        with suppress(OSError):  # others have runs there
            parent.rmdir()


def go_on(folder: Path, overrides: list[str], config_dir: str | None) -> int:
    """resume=: the run in its folder goes on; Hydra, which would make a new one, has no part in it."""
    resume.require_run(folder)
    try:
        with writing(folder):
            return _go_on(folder, overrides, config_dir)
    except Busy as busy:
        jobs.say(str(busy))
        return jobs.FAILED


def _go_on(folder: Path, overrides: list[str], config_dir: str | None) -> int:
    values, finished = resume.prepare(folder, overrides, config_dir)
    values["hardware"]["ddp"] = jobs.TORCHRUN in os.environ  # with as many processes as there are now
    if finished:
        jobs.skipped(folder)
        return jobs.OK
    resume.record(folder, overrides)
    logging_to(folder)
    if notice := resume.hardware_kept(folder, values, overrides):
        jobs.say(notice)
    with _environment({jobs.TOKEN: (token := uuid.uuid4().hex)}):
        jobs.attempt(folder, lambda: jobs.simulate(values, folder, resume=True))
    return _exit_of(folder, token)


def logging_to(folder: Path) -> None:
    """Set logging up as Hydra does for a run in this folder."""
    full = Composer().compose([])
    with open_dict(full.hydra):
        full.hydra.runtime.output_dir = str(folder.resolve())
    configure_log(full.hydra.job_logging)


def sweep(composer: Composer, command: Command) -> int:
    """Many runs: all are checked first, then Hydra's launcher runs them, and a table tells how they ended."""
    master = composer.compose(command.overrides, multirun=True)
    basic = str(master.hydra.launcher._target_).endswith("BasicLauncher")
    require(basic or jobs.TORCHRUN not in os.environ,
            "under torchrun the cells of a sweep run one by one, each in all processes: leave hydra/launcher out")
    named = _naming(composer.swept(_with_params(master, command.overrides)))
    planned = plan(composer, master, command.overrides, named)
    folder = make_folder(Path(_select(master, "hydra.sweep.dir")), fresh=False)
    token = uuid.uuid4().hex
    extra = [*named, f"hydra.sweep.dir={_quoted(folder)}", f"+hydra.job.env_set.{jobs.TOKEN}={token}"]
    extra.append(f"+hydra.job.env_set.{jobs.TOTAL}={len(planned) or ''}")
    if _is_basic(master) and not any(text.startswith("hydra/sweeper=") for text in command.overrides):
        extra += ["hydra/sweeper=planned", f"hydra.sweeper.checked={bool(planned)}"]
    flags = command.flags if command.args.multirun else [*command.flags, "-m"]
    interrupted, stopped = False, None
    try:
        through(flags, [*composer.rewrite(command.overrides), *extra])
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:  # the launcher's: the cells' own failures are in their status files
        stopped = error
    rows = outcomes(folder, token, planned)
    if stopped is not None:
        if isinstance(stopped, ConfigError) and all(row["status"] == ABSENT["status"] for row in rows):
            raise stopped  # a mistake in the command: nothing began
        jobs.say(f"the sweep stopped: {explain(stopped)}")
    show_table(rows)
    print(f"tables with mean and spread over seeds: python -m fedbench.report {shlex.quote(str(folder))}", flush=True)
    failed = not rows or any(row["status"] not in ("finished", "finished already") for row in rows)
    return jobs.INTERRUPTED if interrupted else jobs.FAILED if failed else jobs.OK


def _with_params(master: DictConfig, overrides: list[str]) -> list[str]:
    params = master.hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *overrides]


def _naming(swept: list[str]) -> list[str]:
    """A swept key names its cell even if it is one that otherwise would not."""
    hidden = [key for key in swept if is_matched(key, WHEREABOUTS)]
    if not hidden:
        return []
    left = [pattern for pattern in WHEREABOUTS if not any(is_matched(key, [pattern]) for key in hidden)]
    quoted = ",".join(f"'{pattern}'" for pattern in left)
    return [f"hydra.job.config.override_dirname.exclude_keys=[{quoted}]"]


def plan(composer: Composer, master: DictConfig, overrides: list[str], named: list[str]) -> list[str]:
    """Check the cells of a sweep before any runs; their folder names ([]: only the sweeper knows)."""
    if not _is_basic(master):
        return []
    runs = composer.cells(_with_params(master, overrides))
    few = len(runs) <= MOST_CELLS
    first = [tuple(run) for run in _each_value(runs)]  # so that a wrong value is found at once
    names = {}
    for run in dict.fromkeys([*first, *map(tuple, runs)] if few else first):
        full = checked(composer, [*run, *named])
        check_processes(full, ["-m", *overrides])
        names[run] = _select(full, "hydra.sweep.subdir")
    planned = [names[tuple(run)] for run in runs] if few else []
    twice = next((name for name in planned if planned.count(name) > 1), None)
    require(twice is None, f"this sweep has the same cell twice: {twice}")
    return planned


def _is_basic(master: DictConfig) -> bool:
    """Whether the sweeper is Hydra's, whose cells are the product of the swept values."""
    return str(master.hydra.sweeper._target_).endswith("BasicSweeper")


def _each_value(runs: list[list[str]]) -> list[list[str]]:
    """Every swept value once (of a long list its ends), beside the first of the others."""
    columns = [list(dict.fromkeys(column)) for column in zip(*runs)]
    first = [column[0] for column in columns]
    others = [
        [*first[:i], value, *first[i + 1 :]]
        for i, column in enumerate(columns)
        for value in column[1:]
        if value in (*column[:ENDS], *column[-ENDS:])
    ]
    return [first, *others]


def outcomes(folder: Path, token: str, planned: list[str]) -> list[dict[str, Any]]:
    """How each cell of a sweep ended: what its status.json says, if this command wrote it."""
    found = {}
    for path in sorted(folder.rglob("status.json")):
        status = jobs.read_json(path) or {}
        if status.get("token") == token:
            if status["status"] == "running":
                status |= {"status": "died", "sentence": "the process ended without a word"}
            found[str(path.parent.relative_to(folder))] = status
    found |= {name: elsewhere(folder / name) for name in _met(folder, token) if name not in found}
    planned = [str(Path(name)) for name in planned]  # "" is the sweep's own folder
    names = [*planned, *(name for name in found if name not in planned)]
    return [{"cell": name, **found.get(name, ABSENT)} for name in names]


def _met(folder: Path, token: str) -> list[str]:
    """The cells that this command came to."""
    path = jobs.met_by(folder, token)
    if not path.exists():
        return []
    names = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return list(dict.fromkeys(names))


def elsewhere(cell: Path) -> dict[str, Any]:
    """How a cell stands of which another process has the last word: what that one says, unless it still has it."""
    if held(cell):
        return {"status": "with another process", "score": None, "sentence": holder(cell)}
    status = jobs.read_json(cell / "status.json") or {"status": "running", "score": None}
    if status["status"] == "running":
        return {**status, "status": "died", "sentence": "the other process ended without a word"}
    return {**status, "status": "finished already" if status["status"] == "finished" else status["status"]}


def show_table(rows: list[dict[str, Any]]) -> None:
    """The statuses of a sweep, and how many of each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("cell", "status", "best", ""):
        table.add_column(title, overflow="fold")
    for row in rows:
        score = f"{row['score']:.4f}" if isinstance(row["score"], int | float) else ""
        table.add_row(row["cell"], row["status"], score, row["sentence"])
    width = None if sys.stdout.isatty() else 240  # a file has room: nothing is folded there
    console = Console(markup=False, highlight=False, width=width)
    console.print()
    console.print(table)
    names = list(dict.fromkeys(row["status"] for row in rows))
    tally = ", ".join(f"{sum(row['status'] == name for row in rows)} {name}" for name in names)
    console.print(f"\n{len(rows)} cells: {tally or 'none ran'}")


def through(flags: list[str], overrides: list[str]) -> int:
    """Hand the command to hydra.main; errors come back as exceptions, not as Hydra's text and exit."""
    main = hydra.main(config_path=str(find_conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
    argv, sys.argv = sys.argv, [sys.argv[0], *flags, *overrides]
    try:
        with _environment({"HYDRA_FULL_ERROR": "1"}), jobs.terminable():
            main(jobs.run_cell)()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except COMPLAINTS as error:
        raise ConfigError(explain(error)) from error
    finally:
        sys.argv = argv
    return 0


def make_folder(folder: Path, fresh: bool) -> Path:
    """Make a run's folder; fresh: under a name that nobody has, were two started in the same second."""
    names = (folder.with_name(f"{folder.name}-{k}") if k else folder for k in count())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not fresh:
            folder.mkdir(exist_ok=True)
        made = next(name for name in names if _made(name)) if fresh else folder
        require(os.access(made, os.W_OK), f"cannot write into {made}; set output_dir (sweep_dir for -m)")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"cannot make {folder}: {why}; set output_dir (sweep_dir for -m)") from error
    return made


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _exit_of(folder: Path, token: str) -> int:
    status = jobs.read_json(folder / "status.json") or {}
    return int(status.get("exit", jobs.FAILED)) if status.get("token") == token else jobs.FAILED


def _select(full: DictConfig, key: str) -> str:
    """A key that names a folder, as text; "" would be where the command is typed."""
    try:
        value = OmegaConf.select(full, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    require(bool(str(value or "").strip()), f"{key} must name a folder, got {show(value)}")
    return str(value)


def _quoted(path: Path) -> str:
    text = str(path).replace("'", "\\'")
    return f"'{text}'"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
