"""The record of a run: the run directory's own files, which are the truth, and the same numbers in W&B.

``metrics.csv`` (a row per evaluated round), ``clients.csv`` (a row per client and evaluated round),
``costs.csv`` (a row per round) and ``summary.json`` are written by ``Tracker`` as the rounds go by.  Floats
are written by ``repr``, so that equal runs give equal bytes; timings are in costs.csv alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fedbench.core.digests import Mark
from fedbench.core.files import replace_text
from fedbench.simulation.csv_table import CsvTable, truncate_bytes
from fedbench.simulation.wandb_record import WandbRecord
from fedbench.tasks import scores

TABLES = ("metrics", "clients", "costs")

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
        last_round = -1 if resume_round is None else resume_round
        for name, mark in (marks or {}).items():
            truncate_bytes(self.run_dir / name, mark[0])
        self._tables = {name: CsvTable(self.run_dir / f"{name}.csv", last_round) for name in TABLES}
        self._summary: dict[str, Any] = {}
        self._open = True
        self._wandb = WandbRecord(self.run_dir, cfg, notice)

    def metrics(self, round: int, values: dict[str, float]) -> None:
        """Add the row of an evaluated round to metrics.csv.

        The first row fixes the columns.  Numbers of clients without a column are in summary.json only.
        """
        table = self._tables["metrics"]
        late = {name + scores.COUNT for name in scores.counts(values)}.difference(table.columns or values)
        table.append([{"round": round, **{name: value for name, value in values.items() if name not in late}}])
        self._wandb.log(round, values)

    def clients(self, round: int, columns: dict[str, np.ndarray]) -> None:
        """Add a row per client to clients.csv; ``columns`` are [N] each, and ``client`` is 0..N-1 by default.

        A table that began without client names continues without them.
        """
        begun = self._tables["clients"].columns
        columns = {name: values for name, values in columns.items() if name != "name" or name in (begun or columns)}
        count = len(next(iter(columns.values())))
        numbers = {} if "client" in columns else {"client": np.arange(count)}
        self._tables["clients"].extend({"round": np.full(count, round), **numbers, **columns})

    def costs(self, round: int, values: dict[str, float]) -> None:
        """Add the row of a round to costs.csv."""
        self._tables["costs"].append([{"round": round, **values}])
        self._wandb.log(round, {f"cost/{name}": value for name, value in values.items()})

    def marks(self) -> dict[str, Mark]:
        """The mark of each table as it is by now, by file name; the tables are on the disk when this returns."""
        for table in self._tables.values():
            table.sync()
        return {table.path.name: table.written.mark for table in self._tables.values()}

    def summary(self, values: dict[str, Any]) -> None:
        """Replace summary.json atomically; numbers that are not finite become null."""
        self._summary = json_values(values)
        text = json.dumps(self._summary, indent=1, allow_nan=False) + "\n"
        replace_text(self.run_dir / "summary.json", [text])

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


class NullTracker:
    """In place of a tracker in processes that do not write: records nothing."""

    def metrics(self, round: int, values: dict[str, float]) -> None:
        """Nothing."""

    def clients(self, round: int, columns: dict[str, np.ndarray]) -> None:
        """Nothing."""

    def costs(self, round: int, values: dict[str, float]) -> None:
        """Nothing."""

    def marks(self) -> dict[str, Mark]:
        """None: no table is written."""
        return {}

    def summary(self, values: dict[str, Any]) -> None:
        """Nothing."""

    def __enter__(self) -> NullTracker:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def json_values(value: Any) -> Any:
    """value with NumPy scalars and arrays, paths and non-finite numbers turned into what JSON can hold."""
    if isinstance(value, dict):
        return {str(name): json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return json_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
