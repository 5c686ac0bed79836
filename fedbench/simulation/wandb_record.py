"""The numbers of a run in Weights & Biases.

W&B is optional and can neither prompt, hang nor end a run.  Online, each round is sent as it comes.
Offline, the run is recorded from the files when it closes: ``import wandb`` and ``wandb.init`` take 1.8 s,
200 rounds of 30 numbers 0.13 s (2 cores, wandb 0.31), so the default run starts without them, and a resumed
run, which W&B cannot continue offline (wandb/wandb#2423), gets one record with all its rounds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import netrc
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from fedbench.core.files import replace_text
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError
from fedbench.engine import joint
from fedbench.simulation.csv_table import last_rows, read_rows

MODES = ("auto", "online", "offline", "disabled")
SECONDS_TO_CONNECT = 20.0
SECONDS_TO_UPLOAD = 60.0
LONGEST_NAME, LONGEST_TAG = 128, 64  # maximum lengths in W&B
MOST_CLIENTS_IN_A_TABLE = 10_000  # of W&B; clients.csv has them all
RESULTS = ("last", "best", "best_val", "new_clients", "cost")  # of the summary, to W&B's summary
FACTS = ("commit", "dirty", "partition_hash", "machine", "versions", "executor", "command")  # to W&B's config


def wandb_mode(setting: str) -> tuple[str, str]:
    """(online, offline or disabled, the line that tells the user why or "") for ``tracking.mode``.

    ``auto`` follows WANDB_MODE, else it is online where a key is configured and offline elsewhere.  Nothing
    is imported and nobody is asked: an online run without a key is recorded offline.
    """
    mode = setting
    if setting == "auto":
        given = os.environ.get("WANDB_MODE") or "auto"
        mode = {"dryrun": "offline", "run": "online"}.get(given, given)
    if mode not in MODES:
        name = "tracking.mode" if setting != "auto" else "the variable WANDB_MODE"
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
            self._connect()

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

    def _connect(self) -> None:
        """Open, or continue, the run whose id is in wandb_id.txt; fall back to offline."""
        id_file = self.run_dir / "wandb_id.txt"
        known = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None

        def open_run() -> None:
            self.run = self._init("online", id=known, resume="allow")
            replace_text(id_file, [f"{self.run.id}\n"])
            if known is None:
                self._replay()

        self._try("connecting", open_run)
        if self.run is None:
            self.mode = "offline"

    def _record(self) -> None:
        self.run = self._init("offline")
        self._replay()

    def _init(self, mode: str, **options: Any) -> Any:
        import wandb

        settings = {
            "init_timeout": SECONDS_TO_CONNECT,
            "finish_timeout": SECONDS_TO_UPLOAD,
            "silent": True,
            "console": "off",
        }
        if joint.current():  # the other runs of this process go on
            settings["reinit"] = "create_new"
        known = wandb.Settings.model_fields  # finish_timeout is newer than the oldest wandb we allow
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=str(self.run_dir),
            config=OmegaConf.to_container(self.cfg, resolve=True, throw_on_missing=True),  # type: ignore[arg-type]
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
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
                numbers = {prefix + key: float(value) for key, value in row.items() if key != "round" and value}
                rounds.setdefault(int(row["round"]), {}).update(numbers)
        for round in sorted(rounds):
            self.run.log({"round": round, **rounds[round]}, step=round)

    def _finish(self, status: str, summary: dict[str, Any]) -> None:
        import wandb

        rows = last_rows(self.run_dir / "clients.csv")
        if status == "finished" and 0 < len(rows) <= MOST_CLIENTS_IN_A_TABLE:
            read = {"name": str}  # all others are numbers
            cells = [[read.get(k, float)(value) if value else None for k, value in row.items()] for row in rows]
            table = wandb.Table(columns=list(rows[0]), data=cells)  # type: ignore[arg-type]
            self.run.log({"clients": table})
        self.run.summary.update(
            flatten({name: summary[name] for name in RESULTS if name in summary}, "/", drop_empty=True)
        )
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
    method, seed = cfg.get("name") or choices.algorithm, f"-s{cfg.seed}"
    table = [experiment.split("/")[0]] if experiment else []
    return {
        "project": tracking.project,
        "entity": tracking.entity,
        "group": within(tracking.group or experiment or f"{dataset}-{partition}", LONGEST_NAME),
        "job_type": within(choices.algorithm, LONGEST_TAG),
        "tags": [within(tag, LONGEST_TAG) for tag in [*tracking.tags, dataset, partition, *table]],
        "name": within(f"{method}-{dataset}-{partition}", LONGEST_NAME - len(seed)) + seed,
    }


def within(text: str, most: int) -> str:
    """Return the text, cut to a maximum length with a hash at its end if it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
