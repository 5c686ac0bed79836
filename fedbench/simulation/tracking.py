"""The record of a run: the run directory's own files, which are the truth, and the same numbers in W&B.

``metrics.csv`` (a row per evaluated round), ``clients.csv`` (a row per client and evaluated round),
``costs.csv`` (a row per round) and ``summary.json`` are written by ``Tracker`` as the rounds go by.  Floats
are written by ``repr``, so that equal runs give equal bytes; timings are in costs.csv alone.

W&B is optional and can neither prompt, hang nor end a run.  Online, each round is sent as it comes.
Offline, the run is recorded from the files when it closes: ``import wandb`` and ``wandb.init`` take 1.8 s,
200 rounds of 30 numbers 0.13 s (2 cores, wandb 0.31), so the default run starts without them, and a resumed
run, which W&B cannot continue offline (wandb/wandb#2423), gets one record with all its rounds.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import math
import netrc
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import islice, repeat
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedbench.core.digests import Mark, Running, mark_of
from fedbench.core.options import ConfigError
from fedbench.engine import joint

MODES = ("auto", "online", "offline", "disabled")
TABLES = ("metrics", "clients", "costs")
SECONDS_TO_CONNECT = 20.0
SECONDS_TO_UPLOAD = 60.0
ROWS = 10_000  # of a table that are written at a time
MOST_CLIENTS_IN_A_TABLE = 10_000  # of W&B; clients.csv has them all
RESULTS = ("last", "best", "best_val", "new_clients", "cost")  # of the summary, to W&B's summary
FACTS = ("commit", "dirty", "partition_hash", "machine", "versions", "executor", "command")  # to W&B's config

logger = logging.getLogger(__name__)


class Tracker:
    """Records one run; a context manager, closing with ``finished``, ``failed`` or, interrupted, ``running``.

    ``resume_round``: the round of the checkpoint that the run goes on from (rows of later rounds, which will
    be computed again, are removed), or None for a new run (rows left by an earlier attempt are removed).
    ``marks``: of the tables at that round, if they are known; the tables are then cut where these end.
    ``notice`` takes the few lines meant for the user, the log by default.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: DictConfig,
        resume_round: int | None = None,
        notice: Callable[[str], None] = logger.info,
        marks: Mapping[str, Mark] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        keep = -1 if resume_round is None else resume_round
        for name, mark in (marks or {}).items():
            cut(self.run_dir / name, mark[0])
        self._tables = {name: CsvTable(self.run_dir / f"{name}.csv", keep) for name in TABLES}
        self._summary: dict[str, Any] = {}
        self._open = True
        self._wandb = WandbRecord(self.run_dir, cfg, notice)

    def metrics(self, round: int, values: dict[str, float]) -> None:
        """Add the row of an evaluated round to metrics.csv."""
        self._tables["metrics"].append([{"round": round, **values}])
        self._wandb.log(round, values)

    def clients(self, round: int, columns: dict[str, np.ndarray]) -> None:
        """Add a row per client to clients.csv; ``columns`` are [N] each, without ``client`` it is 0..N-1."""
        count = len(next(iter(columns.values())))
        numbers = {} if "client" in columns else {"client": np.arange(count)}
        self._tables["clients"].extend({"round": np.full(count, round), **numbers, **columns})

    def costs(self, round: int, values: dict[str, float]) -> None:
        """Add the row of a round to costs.csv."""
        self._tables["costs"].append([{"round": round, **values}])
        self._wandb.log(round, {f"cost/{name}": value for name, value in values.items()})

    def marks(self) -> dict[str, Mark]:
        """What the tables hold by now, which is on the disk when this returns."""
        for table in self._tables.values():
            table.sync()
        return {table.path.name: table.written.mark for table in self._tables.values()}

    def summary(self, values: dict[str, Any]) -> None:
        """Replace summary.json atomically; numbers that are not finite become null."""
        self._summary = plain(values)
        text = json.dumps(self._summary, indent=1, allow_nan=False) + "\n"
        replace_file(self.run_dir / "summary.json", [text])

    def close(self, status: str) -> None:
        """Close the files, finish the W&B run; ``status`` is finished, failed or running (to be resumed)."""
        if self._open:
            self._open = False
            for table in self._tables.values():
                with nullcontext() if status == "finished" else suppress(OSError):  # what failed first is told
                    table.close()
            self._wandb.close(status, self._summary)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("finished")
        else:
            self.close("running" if issubclass(kind, KeyboardInterrupt) else "failed")


class CsvTable:
    """A CSV file that grows: the first row ever written fixes its columns; the first column is ``round``.

    Rows of rounds after ``keep``, and a last line cut off by a crash, are removed when it is opened.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.columns = truncate(path, keep)
        self.written = Running(*mark_of(path))
        self._file = path.open("ab")

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows and flush; a row may lack columns, but one with an unknown column is refused."""
        for row in rows:
            self._known(row)
            self._write([",".join(cell(row.get(name)) for name in self.columns) + "\n"])
        self._file.flush()

    def extend(self, columns: Mapping[str, np.ndarray]) -> None:
        """Write the rows of columns [n] of equal length, and flush; what is written is made a column at a time."""
        self._known(columns)
        arrays = [np.asarray(columns[name]) if name in columns else None for name in self.columns]
        count = max(len(a) for a in arrays if a is not None)
        texts = [repeat("", count) if a is None else map(repr, a.tolist()) if a.dtype.kind == "f" else
                 map(str, a.astype(np.int64).tolist()) for a in arrays]
        self._write(",".join(row) + "\n" for row in zip(*texts, strict=True))
        self._file.flush()

    def _write(self, lines: Iterable[str]) -> None:
        left = iter(lines)
        while data := "".join(islice(left, ROWS)).encode():
            self._file.write(data)
            self.written.add(data)

    def _known(self, names: Iterable[str]) -> None:
        """Begin the file with these columns, or refuse one that it does not have."""
        if not self.columns:
            self.columns = list(names)
            self._write([",".join(self.columns) + "\n"])
        unknown = ", ".join(name for name in names if name not in self.columns)
        if unknown:
            raise ValueError(f"{self.path.name} has no column {unknown}; the first row fixed the columns")

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cell(value: Any) -> str:
    """A value as it stands in a CSV file: the shortest digits that give the same number back."""
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    return str(int(value))


def cut(path: Path, size: int) -> None:
    """Leave the first bytes of a file (0: remove it)."""
    if size == 0:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > size:
        os.truncate(path, size)


def truncate(path: Path, keep: int) -> list[str]:
    """Leave the header and the rows of rounds <= keep (keep < 0: remove the file); return the columns."""
    if keep < 0:
        path.unlink(missing_ok=True)
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        header = file.readline()
        whole = header.endswith("\n")
        rows = (line for line in file if line.endswith("\n") and int(line.split(",", 1)[0]) <= keep)
        replace_file(path, (header, *rows) if whole else ())
    return header.strip().split(",") if whole else []


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that whoever reads it, also after a crash, sees the old or the new one, whole."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # a full disk has no room for what is left, either
        part.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """value with numpy scalars and arrays, paths and non-finite numbers turned into what JSON can hold."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def wandb_mode(wanted: str) -> tuple[str, str]:
    """(online, offline or disabled, the line that tells the user why or "") for ``tracking.mode``.

    ``auto`` follows WANDB_MODE, else it is online where a key is configured and offline elsewhere.  Nothing
    is imported and nobody is asked: an online run without a key is recorded offline.
    """
    mode = wanted
    if wanted == "auto":
        given = os.environ.get("WANDB_MODE", "auto")
        mode = {"dryrun": "offline", "run": "online"}.get(given, given)
    if mode not in MODES:
        name = "tracking.mode" if wanted != "auto" else "the variable WANDB_MODE"
        raise ConfigError(f"{name} is {mode}; allowed are {', '.join(MODES)}")
    if mode == "disabled":
        return mode, ""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "W&B: not installed (pip install wandb); the numbers are in the run's files."
    if mode == "offline" or wandb_key_is_configured():
        return ("offline" if mode == "offline" else "online"), ""
    return "offline", "W&B: no login (wandb login); recorded offline when the run ends, for wandb sync."


def wandb_key_is_configured() -> bool:
    """Whether wandb.init would find a key, in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    home = Path.home()
    given = os.environ.get("NETRC")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    for path in [Path(given).expanduser()] if given else [home / ".netrc", home / "_netrc"]:
        try:
            login = netrc.netrc(str(path)).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:
            return True
    return False


class WandbRecord:
    """The run in W&B: live when online, recorded from the run's files on closing when offline."""

    def __init__(self, run_dir: Path, cfg: DictConfig, notice: Callable[[str], None]) -> None:
        self.run_dir, self.cfg, self.notice = run_dir, cfg, notice
        self.run: Any = None
        self.mode, line = wandb_mode(cfg.tracking.mode)
        if line:
            notice(line)
        if self.mode == "online":
            self._go_online()

    def log(self, round: int, values: dict[str, Any]) -> None:
        """Send the numbers of a round, if online."""
        if self.run is not None:
            known = {name: value for name, value in values.items() if value is not None}
            self._try("sending", lambda: self.run.log({"round": round, **known}, step=round))

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Finish the run; an offline one is recorded now, unless it is to be resumed."""
        if self.mode == "offline" and status != "running":
            self._try("recording", self._record)
        if self.run is not None:
            self._try("finishing", lambda: self._finish(status, summary))
            self.run = None

    def _go_online(self) -> None:
        """Open, or continue, the run whose id is in wandb_id.txt; fall back to offline."""
        id_file = self.run_dir / "wandb_id.txt"
        known = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None

        def connect() -> None:
            self.run = self._init("online", id=known, resume="allow")
            replace_file(id_file, [f"{self.run.id}\n"])
            if known is None:
                self._replay()

        self._try("connecting", connect)
        if self.run is None:
            self.mode = "offline"

    def _record(self) -> None:
        self.run = self._init("offline")
        self._replay()

    def _init(self, mode: str, **options: Any) -> Any:
        import wandb

        wanted = {
            "init_timeout": SECONDS_TO_CONNECT,
            "finish_timeout": SECONDS_TO_UPLOAD,
            "silent": True,
            "console": "off",
        }
        if joint.current():  # the other runs of this process go on
            wanted["reinit"] = "create_new"
        known = wandb.Settings.model_fields  # finish_timeout is newer than the oldest wandb we allow
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=str(self.run_dir),
            config=OmegaConf.to_container(self.cfg, resolve=True, throw_on_missing=True),  # type: ignore[arg-type]
            settings=wandb.Settings(**{name: value for name, value in wanted.items() if name in known}),
            **run_names(self.cfg),
            **options,
        )
        run.define_metric("*", step_metric="round", summary="none")
        if mode == "online":
            self.notice(f"W&B: {run.url}")
        return run

    def _replay(self) -> None:
        """Log what metrics.csv and costs.csv hold, a round at a time."""
        rounds: dict[int, dict[str, float]] = {}
        for name, prefix in (("metrics", ""), ("costs", "cost/")):
            for row in read_rows(self.run_dir / f"{name}.csv"):
                numbers = {
                    prefix + key: float(value) for key, value in row.items() if key != "round" and value
                }
                rounds.setdefault(int(row["round"]), {}).update(numbers)
        for round in sorted(rounds):
            self.run.log({"round": round, **rounds[round]}, step=round)

    def _finish(self, status: str, summary: dict[str, Any]) -> None:
        import wandb

        rows = last_rows(self.run_dir / "clients.csv")
        if status == "finished" and 0 < len(rows) <= MOST_CLIENTS_IN_A_TABLE:
            numbers = [[float(value) if value else None for value in row.values()] for row in rows]
            table = wandb.Table(columns=list(rows[0]), data=numbers)  # type: ignore[arg-type]
            self.run.log({"clients": table})
        self.run.summary.update(flat({name: summary[name] for name in RESULTS if name in summary}))
        self.run.config.update({"facts": {name: summary[name] for name in FACTS if name in summary}})
        record = Path(self.run.dir).parent  # offline-run-<time>-<id>, with files/ in it
        self.run.finish(exit_code=1 if status == "failed" else 0)
        if self.mode == "offline":
            self.notice(f"W&B: recorded offline; to upload it: wandb sync {shlex.quote(str(record))}")

    def _try(self, doing: str, action: Callable[[], None]) -> None:
        """Do something with W&B; whatever goes wrong there is told in one line and W&B is left alone."""
        try:
            action()
        except Exception as error:  # of any kind: the run must go on
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.notice(f"W&B: {doing} failed ({first}); the run goes on, its files have every number.")
            self.run = None


def run_names(cfg: DictConfig) -> dict[str, Any]:
    """What the run is called in W&B, from the chosen option of each group."""
    choices, tracking = cfg.choices, cfg.tracking
    dataset, partition, experiment = choices.dataset, choices.partition, choices.get("experiment")
    method = cfg.get("name") or choices.algorithm
    return {
        "project": tracking.project,
        "entity": tracking.entity,
        "group": tracking.group or experiment or f"{dataset}-{partition}",
        "job_type": choices.algorithm,
        "tags": [*tracking.tags, dataset, partition, *([experiment.split("/")[0]] if experiment else [])],
        "name": f"{method}-{dataset}-{partition}-s{cfg.seed}",
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as dicts of strings; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def last_rows(path: Path) -> list[dict[str, str]]:
    """Rows of the last round of a CSV file, read without holding the others."""
    rows: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if rows and rows[-1]["round"] != row["round"]:
                    rows.clear()
                rows.append(row)
    return rows


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, the names joined by a slash."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found
