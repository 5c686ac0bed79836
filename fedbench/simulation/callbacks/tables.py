"""Write metrics.csv, clients.csv, costs.csv and summary.json.

Floats are written by ``repr``, so equal runs give equal bytes.  Of the tables, only costs.csv contains timings.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.core.digests import Mark
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.csv_table import CsvTable, truncate_bytes
from fedbench.simulation.summary import output_marks, seal, summary, write_summary
from fedbench.tasks import scores

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

TABLES = ("metrics", "clients", "costs")


class Tables(Callback):
    """Write the tables and the summary of a run."""

    name = "tables"

    def __init__(self) -> None:
        self.tables: dict[str, CsvTable] = {}

    def on_start(self, run: Simulation, saved: Mapping[str, Mark] | None) -> None:
        """Open the tables, and write summary.json with the status "running".

        Args:
            run: The run.
            saved: Size and checksum of each table at the checkpoint of a resumed run; later lines are removed.
        """
        self.open(run.run_dir, run.done, saved)
        write_summary(run.run_dir, summary(run, "running"))

    def open(self, run_dir: Path, done: int = 0, marks: Mapping[str, Mark] | None = None) -> None:
        """Open the tables of a run folder.

        Args:
            run_dir: The run folder.
            done: The round of the checkpoint, 0 for a new run.  Lines of later rounds are removed.
            marks: Size and checksum of each table at that round.  Checkpoints of older versions have none.
        """
        for file, (size, _) in (marks or {}).items():  # _: the checksum, which was compared before
            truncate_bytes(run_dir / file, size)
        # -1: a new run removes existing tables
        self.tables = {name: CsvTable(run_dir / f"{name}.csv", last_round=done or -1) for name in TABLES}

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Add ``metrics`` as a line to metrics.csv, and ``clients`` as one line per client to clients.csv."""
        self.add_metrics(run.done, metrics)
        self.add_clients(run.done, clients)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Add ``costs`` as a line to costs.csv."""
        self.add_costs(run.done, costs)

    def add_metrics(self, round: int, values: Mapping[str, float]) -> None:
        """Add the line of an evaluated round to metrics.csv.

        The first line determines the columns.  If a metric is undefined for some clients, `values` also has the number
        of the others (name + scores.COUNT_SUFFIX).  Where that first occurs in a later round, it has no column.

        Args:
            round: The evaluated round, from 1.
            values: Scores by name.
        """
        table = self.tables["metrics"]
        counts = {name + scores.COUNT_SUFFIX for name in scores.defined_counts(values)}
        late = counts.difference(table.columns or values)
        table.append([{"round": round, **{name: value for name, value in values.items() if name not in late}}])

    def add_clients(self, round: int, columns: Mapping[str, np.ndarray]) -> None:
        """Add one line per client to clients.csv.

        A table that began without client names continues without them.

        Args:
            round: The evaluated round, from 1.
            columns: Values by name, [n] each.  ``client`` is 0 to n - 1 by default.
        """
        existing = self.tables["clients"].columns
        if existing and "name" not in existing:
            columns = {name: values for name, values in columns.items() if name != "name"}
        count = len(next(iter(columns.values())))
        numbers = {} if "client" in columns else {"client": np.arange(count)}
        self.tables["clients"].extend({"round": np.full(count, round), **numbers, **columns})

    def add_costs(self, round: int, values: Mapping[str, float]) -> None:
        """Add the line of a round (from 1) to costs.csv, given its costs by column."""
        self.tables["costs"].append([{"round": round, **values}])

    def on_checkpoint(self, run: Simulation) -> dict[str, Mark]:
        """Flush the tables to the disk, and return [number of bytes, CRC-32 as hex] of each by file name."""
        for table in self.tables.values():
            table.sync()
        return {table.path.name: table.written.mark for table in self.tables.values()}

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Write ``summary`` to summary.json, unless ``status`` is "interrupted", and close the tables."""
        try:
            if status == "finished":
                files = {**self.on_checkpoint(run), **output_marks(run.run_dir)}  # size and checksum of each file
                write_summary(run.run_dir, seal({**summary, "files": files}))  # seal: with a digest of all entries
            elif status in ("paused", "failed"):
                write_summary(run.run_dir, summary)
        finally:
            self.close(status)

    def close(self, status: Status = "finished") -> None:
        """Close the tables.

        Args:
            status: The status of the run.  Unless it is "finished", write errors are ignored, because an earlier error
                is to be reported.
        """
        for table in self.tables.values():
            with nullcontext() if status == "finished" else suppress(OSError):
                table.close()
