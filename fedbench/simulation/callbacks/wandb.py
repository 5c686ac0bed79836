"""Log a run to Weights & Biases.  Errors of W&B never prompt, block or end a run.

Online, each round is sent when it ends.  Offline, the run is recorded from its tables at its end, so that it starts
without ``import wandb``.  W&B cannot append to an offline record (wandb/wandb#2423), so a resumed run gets one record
with all its rounds.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from fedbench.core.files import replace_text
from fedbench.core.nested import flatten
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.callbacks.wandb_names import run_names, wandb_mode
from fedbench.simulation.csv_table import last_rows, read_rows
from fedbench.simulation.summary import json_values

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

log = logging.getLogger(__name__)
SECONDS_TO_CONNECT = 20.0
SECONDS_TO_UPLOAD = 60.0
MOST_CLIENTS_IN_A_TABLE = 10_000  # limit of W&B; clients.csv has all clients
RESULTS = ("last", "best", "best_val", "new_clients", "cost")  # keys of summary.json for W&B's summary
FACTS = ("commit", "dirty", "partition_hash", "machine", "versions", "executor", "command")  # ... for W&B's config


class Wandb(Callback):
    """Send a run to W&B, or record it offline at its end; `run` is W&B's run, None without a connection.

    Args:
        mode: The option tracking.mode.
        notice: Function that logs a line for the user.
    """

    def __init__(self, mode: str, notice: Callable[[str], None] = log.info):
        self.mode, self.mode_note = wandb_mode(mode)  # mode_note: why another mode is used; "" for nothing to say
        self.notice = notice
        self.run: Any = None

    def on_start(self, run: Simulation, saved: None) -> None:
        """Log how W&B is used, and connect to it in the mode "online".

        Nothing is `saved` in checkpoints: wandb_id.txt has the id of the run.
        """
        self.run_dir, self.cfg = run.run_dir, run.cfg
        if self.mode_note:
            self.notice(self.mode_note)
        if self.mode == "online":
            self._connect()

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Send ``metrics``, the scores of round ``run.done``, to W&B, if connected.

        The argument ``clients`` is not used, because `on_end` sends the last scores of the clients.
        """
        self._send(run.done, metrics)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Send the costs of round ``run.done`` to W&B under the names cost/NAME, if connected."""
        self._send(run.done, {f"cost/{name}": value for name, value in costs.items()})

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Finish the record in W&B.  An offline run is recorded now, unless it was paused or interrupted.

        Args:
            run: The run, not used, because `on_start` stored its folder and configuration.
            status: finished, paused, failed or interrupted.
            summary: The content of summary.json.
        """
        values = json_values(dict(summary))
        if self.mode == "offline" and status not in ("paused", "interrupted"):
            # A thread has its own short stack.  With a deep stack, CPython 3.11 may map and unmap memory at each call.
            recording = threading.Thread(target=self._record, args=(status, values), daemon=True)
            recording.start()
            recording.join()
        elif self.run is not None:
            self._try("finishing", lambda: self._finish(status, values))
        self.run = None

    def _send(self, round: int, values: Mapping[str, Any]) -> None:
        """Send values, {name: value}, of a round (from 1) to W&B, except those that are None.

        Do nothing if not connected.
        """
        if self.run is not None:
            defined = {name: value for name, value in values.items() if value is not None}
            self._try("sending", lambda: self.run.log({"round": round, **defined}, step=round))

    def _connect(self) -> None:
        """Open a run in W&B, or continue the one whose id is in wandb_id.txt.

        If this fails, set the mode to "offline": the run is then recorded at its end.
        """
        id_file = self.run_dir / "wandb_id.txt"
        stored_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None

        def open_run() -> None:
            self.run = self._init("online", id=stored_id, resume="allow")
            replace_text(id_file, [f"{self.run.id}\n"])
            if stored_id is None:  # W&B does not have the rounds before a resume
                self._replay()

        self._try("connecting", open_run)
        if self.run is None:
            self.mode = "offline"

    def _record(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Record the whole run offline, from its tables.

        Args:
            status: finished or failed.
            summary: The content of summary.json, as JSON values.
        """

        def record() -> None:
            self.run = self._init("offline")
            self._replay()

        self._try("recording", record)
        if self.run is not None:
            self._try("finishing", lambda: self._finish(status, summary))

    def _init(self, mode: str, **options: Any) -> Any:
        """Call wandb.init, and return the run of W&B.

        Args:
            mode: "online" or "offline".
            **options: Further arguments of wandb.init.
        """
        import wandb

        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=str(self.run_dir),
            config=OmegaConf.to_container(self.cfg, resolve=True, throw_on_missing=True),  # type: ignore[arg-type]
            settings=wandb.Settings(**_settings(mode, wandb.Settings.model_fields)),
            **run_names(self.cfg, self.run_dir),
            **options,
        )
        run.define_metric("*", step_metric="round", summary="none")  # plotted over rounds; `_finish` writes the summary
        if mode == "online":
            self.notice(f"W&B: {run.url}")
        return run

    def _replay(self) -> None:
        """Send the content of metrics.csv and costs.csv to the opened run of W&B, round by round."""
        rounds: dict[int, dict[str, float]] = {}
        for name, prefix in (("metrics", ""), ("costs", "cost/")):
            for row in read_rows(self.run_dir / f"{name}.csv"):
                # without empty cells, of values that do not exist
                numbers = {prefix + key: float(value) for key, value in row.items() if key != "round" and value}
                rounds.setdefault(int(row["round"]), {}).update(numbers)
        for round in sorted(rounds):
            self.run.log({"round": round, **rounds[round]}, step=round)

    def _finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Send the table of clients and the summary, and end the run of W&B.

        Args:
            status: finished or failed.
            summary: The content of summary.json, as JSON values.
        """
        import wandb

        rows = last_rows(self.run_dir / "clients.csv")
        if status == "finished" and 0 < len(rows) <= MOST_CLIENTS_IN_A_TABLE:
            types = {"name": str}  # all other columns are numbers
            cells = [[types.get(k, float)(value) if value else None for k, value in row.items()] for row in rows]
            table = wandb.Table(columns=list(rows[0]), data=cells)  # type: ignore[arg-type]
            self.run.log({"clients": table})
        results = {name: summary[name] for name in RESULTS if name in summary}
        self.run.summary.update(flatten(results, separator="/", drop_empty=True))
        # facts about the run, such as the commit
        self.run.config.update({"facts": {name: summary[name] for name in FACTS if name in summary}})
        record = Path(self.run.dir).parent  # run.dir is offline-run-<time>-<id>/files
        self.run.finish(exit_code=1 if status == "failed" else 0)
        if self.mode == "offline":
            self.notice(f"W&B: recorded offline; to upload it: wandb sync {shlex.quote(str(record))}")

    def _try(self, doing: str, action: Callable[[], None]) -> None:
        """Call a function that uses W&B.  On an error, log one line and continue without W&B.

        Args:
            doing: What the function does, for that line, such as "sending".
            action: The function.
        """
        try:
            action()
        except Exception as error:  # of any kind
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.notice(f"W&B: {doing} failed ({first}); the run continues without W&B, and its files are complete.")
            self.run = None


def _settings(mode: str, supported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run in W&B: short waits, no output, and no record of the console.

    Offline, the load of the machine is not recorded either.

    Args:
        mode: "online" or "offline".
        supported: The settings of the installed version.  Others are omitted.
    """
    settings = {
        "init_timeout": SECONDS_TO_CONNECT,
        "finish_timeout": SECONDS_TO_UPLOAD,
        "silent": True,
        "console": "off",
        # offline, the record is made from the tables after the run, so the load of the machine is not that of the run
        "x_disable_stats": mode == "offline",
    }
    return {name: value for name, value in settings.items() if name in supported}
