"""One run in its folder: a new one, one that goes on, one that is finished already; and how it ended.

``run_cell`` is Hydra's task function, for a single run and for each cell of a sweep.  It never raises for a
failed run: the outcome is a file (status.json), so that the end of a sweep can be told whichever launcher ran
the cells, in whichever process.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shlex
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedbench.config.check import check
from fedbench.config.choices import named_classes, with_choices
from fedbench.config.conf_tree import models_with
from fedbench.config.targets import as_word, to_repeat
from fedbench.core import caller, collector, signals
from fedbench.core.files import read_json, replace_text
from fedbench.core.lock import MARK, NAME, Busy, writing
from fedbench.core.options import ConfigError, MissingColumns, PeerLost, require
from fedbench.core.settings import config_hash, load_config, save_config
from fedbench.core.streams import lasting
from fedbench.engine import joint
from fedbench.simulation.progress import config_dir_of, primary_of

log = logging.getLogger(__name__)
TOKEN = "FEDBENCH_SWEEP"  # environment variable: which command a status belongs to
TOTAL = "FEDBENCH_CELLS"  # environment variable: how many cells the sweep has
TYPED = "FEDBENCH_COMMAND"  # environment variable: the command's words as typed
TORCHRUN = "TORCHELASTIC_RUN_ID"  # environment variable: torchrun started this process, perhaps with others
CHECKPOINTS = ("checkpoint.pt", "checkpoint.prev.pt")
FILES = (*CHECKPOINTS, "metrics.csv", "clients.csv", "costs.csv", "summary.json", "partition.npz", "matrices.npz")
LEFTOVERS = ("*.part", "*.partial")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130  # exit statuses


class Console(logging.StreamHandler):
    """A log handler that writes to whatever sys.stdout is by then, so that a progress bar can move aside."""

    def __init__(self, stream: Any = None) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The current standard output."""
        return sys.stdout


class LogFile(logging.FileHandler):
    """run.log; where it cannot be written, as on a full disk, the run goes on without it and nothing is printed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, if the disk takes it."""
        with suppress(OSError):  # of opening it, which logging.FileHandler leaves until the first line
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback between the run's own lines."""

    def close(self) -> None:
        """Hydra closes it between the cells of a sweep."""
        with suppress(OSError):
            super().close()


@lasting()  # also in the process of a launcher
def run_cell(cfg: DictConfig) -> float:
    """Run what Hydra composed, in Hydra's output directory; returns the score (NaN when it failed)."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    is_cell = str(hydra.mode).endswith("MULTIRUN")
    if is_cell:
        total = os.environ.get(TOTAL)
        print(f"\ncell {hydra.job.num + 1}{f' of {total}' if total else ''}: {folder.name}", flush=True)
        _note_visit(folder, Path(hydra.sweep.dir).absolute())
    try:
        with writing(folder):
            score = attempt(folder, lambda: _run_or_resume(cfg, hydra, folder))
    except Busy as busy:
        tell(busy, str(busy))
        return math.nan
    if is_cell and not is_basic(hydra.sweeper) and not math.isnan(score):
        _report_score(folder, score)
    return score


def _note_visit(folder: Path, sweep: Path) -> None:
    """Note, for the sweep's table, that the command came to the cell: another one may have it, or come to it later and
    write its own status."""
    with open(visited_file(sweep, os.environ.get(TOKEN, "")), "a", encoding="utf-8") as file:
        file.write(f"{folder.absolute().relative_to(sweep)}\n")


def visited_file(sweep: Path, token: str) -> Path:
    """The file of a sweep's folder that lists the cells which a command came to."""
    return sweep / f".met-{token}"


def _run_or_resume(cfg: DictConfig, hydra: HydraConf, folder: Path) -> tuple[str, float]:
    values = check(with_choices(cfg, hydra))
    stored = _stored_config(folder)
    if stored is not None and not _is_same_run(stored, values):
        _set_aside(folder)
        stored = None
    if stored is None:
        _save(values, hydra, folder)
    elif is_finished(folder, values):
        return skip(folder)
    elif is_resumable(folder):
        # What was chosen for this machine stays: it is part of bit-exact resuming.
        return simulate({**values, "hardware": stored["hardware"]}, folder, resume=True)
    return simulate(values, folder)


def simulate(values: Mapping[str, Any], folder: Path, resume: bool = False) -> tuple[str, float]:
    """Run the simulator on a checked config; (status, score)."""
    check_files(folder)
    remove_leftovers(folder)
    write_status(folder, "running", FAILED)
    (folder / "error.txt").unlink(missing_ok=True)
    from fedbench.simulation.simulator import run  # torch: not before it is needed

    collector.wake()
    cfg = OmegaConf.create(dict(values))
    OmegaConf.set_readonly(cfg, True)
    if under_torchrun():
        from fedbench.app.follow import announce_run

        announce_run((values, folder, resume))
    origin = {"command": typed(), "classes": named_classes(values)}
    return "finished", score_of(run(cfg, folder, resume, origin))


def check_files(folder: Path) -> None:
    """Refuse a run folder in which folders have the names of output files."""
    wrong = next((folder / name for name in FILES if (folder / name).is_dir()), None)
    require(wrong is None, f"{wrong} is a folder, and a run writes a file of that name: move it away")


def skip(folder: Path) -> tuple[str, float]:
    """Say that a run is finished; its score again."""
    print(f"{folder}: finished already", flush=True)
    return "finished already", score_of(read_json(folder / "summary.json"))


def attempt(folder: Path, work: Callable[[], tuple[str, float]]) -> float:
    """Do the work, record its result in folder/status.json, and print one sentence after a failure.

    Interruptions are recorded and raised again: they end a sweep, and a failure does not.  A launcher's signal handler
    may then end the process, because the run is saved.
    """
    with interruptible():
        try:
            status, score = work()
        except KeyboardInterrupt:
            write_status(folder, "interrupted", INTERRUPTED, sentence="interrupted")
            say(f"interrupted; it is {how_to_resume(folder)}")
            raise
        except (Exception, SystemExit) as error:  # a method that calls sys.exit() did not finish its run
            _failed(folder, error)
            return math.nan
        write_status(folder, status, OK, score)
        return score


def _failed(folder: Path, error: BaseException) -> None:
    """error.txt: the sentence, then the traceback; the terminal gets the sentence."""
    sentence = sentence_of(error, folder)
    is_written = _try_to_write(folder / "error.txt", f"{sentence}\n\n{traceback.format_exc()}")
    # A ConfigError itself is a mistake in the command; its subclasses are runs that could not go on.
    write_status(folder, "failed", MISTAKE if type(error) is ConfigError else FAILED, sentence=sentence)
    log.debug("failed", exc_info=True)  # into run.log only
    clear = isinstance(error, ConfigError) or not is_written
    tell(error, sentence if clear else f"{sentence} (the traceback is in {folder / 'error.txt'})")


def sentence_of(error: BaseException, folder: Path) -> str:
    """What went wrong, in one line if it is not ours."""
    if isinstance(error, PeerLost):
        return f"{error}; up to its last checkpoint the run is {how_to_resume(folder)}"
    if isinstance(error, MissingColumns) and (others := models_with(error.columns)):
        return f"{error}, or take a model that does: {', '.join(others)}"
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the run is not finished: something in it called sys.exit({error.code!r})"
    if isinstance(error, OSError) and error.errno in FULL:
        how = how_to_resume(folder)
        return f"no room is left on the disk of {folder} ({error.strerror}): make some; the run is {how}"
    first = next(iter(str(error).splitlines()), "no message")
    return f"{type(error).__name__}: {first}"


def _try_to_write(path: Path, text: str) -> bool:
    """Write a file whole, or leave it as it was and say so: a full disk must not hide why the run failed."""
    try:
        replace_text(path, [text], durable=False)
    except OSError:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing: files that were to be renamed when they were whole."""
    for pattern in LEFTOVERS:
        for path in [*folder.glob(pattern), *(folder / ".hydra").glob(pattern)]:
            if path.is_file():
                path.unlink(missing_ok=True)


def how_to_resume(folder: Path) -> str:
    """The command that goes on with a run which was stopped, if there is a checkpoint to go on from."""
    if not is_resumable(folder):
        return f"not saved, as there was no checkpoint yet; {folder} holds what there is"
    return f"saved, go on with: {resume_command(folder)}"


def resume_command(folder: Path) -> str:
    """Return the command, or the call, that resumes the run in a folder.

    It includes --config-dir and the values that a command must repeat: classes of the user and a trusted pickle.
    """
    config, options = folder / "config.yaml", config_dir_of(folder)
    if options is not None and not Path(options).is_dir():
        options = None
    stored = OmegaConf.to_container(load_config(config)) if config.is_file() else {}
    words = [as_word(key, value) for key, value in to_repeat(stored, options)]  # type: ignore[arg-type]
    if caller.current() is not None:
        values = {"config_dir": options, "resume": str(folder)}
        named = [f"{name}={value!r}" for name, value in values.items() if value is not None]
        return f"fedbench.run({', '.join([*map(repr, words), *named])})"
    flags = [] if options is None else ["--config-dir", options]
    return caller.suggested(f"{command()} {shlex.join([*flags, f'resume={folder}', *words])}")


def under_torchrun() -> bool:
    """Whether torchrun started this process, perhaps with others."""
    return TORCHRUN in os.environ


def typed() -> str:
    """The command that this process runs, as it was typed."""
    return f"{command()} {os.environ.get(TYPED, shlex.join(sys.argv[1:]))}".rstrip()


def command() -> str:
    """How this process was started, up to what was asked of it."""
    if not under_torchrun():
        return "python -m fedbench"
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    many = f"--nnodes={machines} " if machines != "1" else ""
    return f"torchrun {many}--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']} -m fedbench"


def say(sentence: str) -> None:
    """One line for the user, on standard error."""
    print(f"fedbench: {sentence}", file=sys.stderr, flush=True)


def tell(error: BaseException, sentence: str) -> None:
    """What ended a run: the sentence on standard error; the error itself to Python that asked for the run."""
    if (who := caller.current()) is None:
        say(sentence)
    else:
        who.errors.append(error)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for every stop signal, so that the run is saved before a scheduler ends it."""
    if threading.current_thread() is not threading.main_thread() or joint.current():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with signals.handled(interrupt):
        yield


def _stored_config(folder: Path) -> dict[str, Any] | None:
    """The config of the run that is in the folder; None: there is none (or it was killed before it began)."""
    path = folder / "config.yaml"
    try:
        return OmegaConf.to_container(load_config(path)) if path.exists() else None  # type: ignore[return-value]
    except ConfigError:
        _set_aside(folder)
        return None


def _is_same_run(stored: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether two configs ask for the same run; a stored one that was cut off asks for none."""
    try:
        return config_hash(stored) == config_hash(values)
    except (KeyError, TypeError, AttributeError):
        return False


def _set_aside(folder: Path) -> None:
    """Move what is in a folder that holds another run, so that nothing is lost; the folder, and its lock, stay."""
    old = next(p for k in count(1) if not (p := folder.with_name(f"{folder.name}.old-{k}")).exists())
    old.mkdir()
    contents = [path for path in folder.iterdir() if path.name not in (NAME, MARK)]
    for path in sorted(contents, key=lambda path: path.name == "config.yaml"):  # last, were this to be cut off
        path.rename(old / path.name)
    print(f"{folder} held a run with another config: that one is now {old.name}", flush=True)


def _save(values: Mapping[str, Any], hydra: HydraConf, folder: Path) -> None:
    """Our config.yaml, and what Hydra would have written (it would overwrite it on every run)."""
    inner = folder / ".hydra"
    inner.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), inner / "hydra.yaml")
    OmegaConf.save(hydra.overrides.task, inner / "overrides.yaml")
    save_config(values, inner / "config.yaml")
    save_config(values, folder / "config.yaml")


def is_finished(folder: Path, values: Mapping[str, Any]) -> bool:
    """Whether the run is finished, its files still what it wrote; ConfigError where its data have changed since."""
    summary = read_json(folder / "summary.json")
    if summary.get("status") != "finished":
        return False
    if (name := _damaged(folder, summary)) is not None:
        say(f"{folder} is finished, but {name} is no longer what the run wrote: it goes on from its checkpoint")
        return False
    then = summary.get("data_hash")
    now = _data_hash(folder, values) if then else None
    require(
        now in (None, then),
        f"{folder} is finished, but the data are no longer those of the run (digest "
        f"{str(now)[:12]}, the run's {str(then)[:12]}): put its files back, or move the folder away to run it anew",
    )
    return True


def _damaged(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """The first file of a finished run that is not what its summary says, if the summary says it."""
    if "digest" not in summary:
        return None
    from fedbench.core.digests import differing, digest  # NumPy

    if digest({name: value for name, value in summary.items() if name != "digest"}) != summary["digest"]:
        return "summary.json"
    return differing(folder, summary.get("files", {}), whole=True)


def _data_hash(folder: Path, values: Mapping[str, Any]) -> str | None:
    """The digest of a run's data as they are now; None where they are not to be had."""
    from fedbench.data import _known as known

    def load() -> Any:
        from fedbench.simulation.build import load  # torch

        return load(OmegaConf.create(dict(values)))

    try:
        return known.digest(known.key_of(values["dataset"]), values["data_dir"], load)
    except ConfigError as error:
        say(f"{folder}: whether its data have changed cannot be told ({error})")
        return None


def is_resumable(folder: Path) -> bool:
    """Whether there is a checkpoint that is not truncated (a zip file ends with its directory)."""
    return any(zipfile.is_zipfile(folder / name) for name in CHECKPOINTS)


def has_begun(folder: Path) -> bool:
    """Whether a run came as far as its first round."""
    return any((folder / name).exists() for name in ("summary.json", *CHECKPOINTS))


def score_of(summary: Mapping[str, Any] | None) -> float:
    """Return the score of a run for sweepers; NaN if there is none.

    It is the best validation score if clients have validation parts, else the test score of the last round.
    """
    part = "val" if has_validation(summary) else "personal"
    return value_in(summary, "best_val" if part == "val" else "last", f"{part}/{primary_of(summary or {})}")


def has_validation(summary: Mapping[str, Any] | None) -> bool:
    """Return whether the run evaluated validation parts."""
    return any(name.startswith("val/") for name in _values_of(summary, "last"))


def value_in(summary: Mapping[str, Any] | None, entry: str, column: str) -> float:
    """Return a metric of the last round (entry: last) or of the best one (best, best_val); NaN if there is none."""
    value = _values_of(summary, entry).get(column)
    return float(value) if isinstance(value, int | float) else math.nan


def _values_of(summary: Mapping[str, Any] | None, entry: str) -> Mapping[str, Any]:
    values = (summary or {}).get(entry)
    if isinstance(values, dict) and entry != "last":
        values = values.get("values")
    return values if isinstance(values, dict) else {}


def is_basic(sweeper: Any) -> bool:
    """Return whether the configured sweeper is Hydra's, which uses no scores."""
    return str(sweeper._target_).endswith(("BasicSweeper", "Planned"))


def _report_score(folder: Path, score: float) -> None:
    """Print the score that a sweeper gets, and its kind."""
    summary = read_json(folder / "summary.json")
    name = primary_of(summary)
    what = f"the best validation {name}"
    if not has_validation(summary):
        what = f"{name} on the test parts in the last round, as there are no validation parts (dataset.val_fraction)"
    print(f"{folder.name}: the sweeper gets {score:.4f}, {what}", flush=True)


def write_status(folder: Path, status: str, exit_status: int, score: float = math.nan, sentence: str = "") -> None:
    """Write status.json: how this attempt at the run stands."""
    line = {"token": os.environ.get(TOKEN, ""), "status": status, "exit": exit_status, "sentence": sentence}
    _try_to_write(folder / "status.json", json.dumps({**line, "score": None if math.isnan(score) else score}))
