"""Show the progress of a run: a bar on a terminal, one updated line in a notebook, about 20 lines elsewhere."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.summary_text import duration

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

LINES = 20  # approximate number of lines per run without a terminal
REDRAWN = 0.1  # minimum seconds between updates of a notebook's line


class Progress(Callback):
    """Show the round, the score, images/s and the remaining time: as a bar (`_bar`), an updated `_line`, or many lines.

    Args:
        transient: Whether to remove the bar at the end, and to show nothing if standard output is not a terminal.
    """

    def __init__(self, transient: bool = False) -> None:
        self.transient = transient
        self._bar: Any = None

    def on_start(self, run: Simulation, saved: None) -> None:
        """Show a bar or a line of progress, beginning at the finished rounds of the run; ``saved`` is not used."""
        self.open(run.cfg.rounds, run.done, run.engine.task.primary)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Show the number of finished rounds, the last score, and the speed, ``costs["images_per_s"]``."""
        self.update(run.done, run.last.get(run.primary, math.nan), costs["images_per_s"])

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Stop the progress bar, if there is one.  The status changes nothing."""
        self.close()

    def open(self, total: int, start: int = 0, primary: str = "accuracy") -> None:
        """Start showing progress.

        Args:
            total: The number of rounds of the run.
            start: The number of finished rounds.
            primary: The name of the score.
        """
        self.total, self.start, self.primary = total, start, primary
        self.every = max(1, math.ceil(total / LINES))  # rounds between lines, of which about LINES are printed
        self._began = time.monotonic()
        self._bar = _bar(total, start, primary, self.transient) if sys.stdout.isatty() else None
        self._line = None if self._bar else notebook_line()

    def update(self, round: int, score: float, images_per_s: float) -> None:
        """Update the display after a round.

        Args:
            round: The finished round, from 1.
            score: The last score; NaN before the first evaluation.
            images_per_s: Training samples per second.
        """
        fields = {"score": "-" if math.isnan(score) else f"{score:.4f}", "speed": f"{images_per_s:,.0f}"}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=round, **fields)
        elif self.transient:  # only a bar, which disappears at the end
            return
        elif self._line is not None:
            self._line.show(self._text(round, fields), last=round == self.total)
        # the first round of this process, the last one, and every so many that about 20 lines are printed
        elif round in (self.start + 1, self.total) or round % self.every == 0:
            print(self._text(round, fields), flush=True)

    def _text(self, round: int, fields: dict[str, str]) -> str:
        """Return the line of a round.

        Args:
            round: The finished round, from 1.
            fields: "score" and "speed" (images/s) as text.
        """
        seconds_left = (time.monotonic() - self._began) / (round - self.start) * (self.total - round)
        return (
            f"round {round:>{len(str(self.total))}}/{self.total}  {self.primary} {fields['score']:>6}  "
            f"{fields['speed']:>9} images/s  {duration(seconds_left)} left"
        )

    def close(self) -> None:
        """Stop the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.stop()


class NotebookLine:
    """A line in the output of a notebook's cell, which each update replaces.

    Args:
        display: The function IPython.display.display.
    """

    def __init__(self, display: Any) -> None:
        self._display, self._handle, self._shown_at = display, None, -math.inf

    def show(self, text: str, last: bool = False) -> None:
        """Replace the line, unless the previous update was less than REDRAWN seconds ago.

        Args:
            text: The line.
            last: Whether this is the last update, which is always shown.
        """
        now = time.monotonic()
        if not last and now - self._shown_at < REDRAWN:
            return
        self._shown_at, line = now, {"text/plain": text}
        if self._handle is None:  # _display: IPython's function, which returns a handle for updates
            self._handle = self._display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)


def notebook_line() -> NotebookLine | None:
    """Return a NotebookLine if standard output is the output of a notebook's cell, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None or not type(sys.stdout).__module__.startswith("ipykernel"):
        return None
    return NotebookLine(importlib.import_module("IPython.display").display)


def _bar(total: int, start: int, primary: str, transient: bool) -> Any:
    """Show a progress bar of rich, and return it.

    Args:
        total: The number of rounds of the run.
        start: The number of finished rounds.
        primary: The name of the score.
        transient: Whether the bar disappears at the end.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn(f"{primary} {{task.fields[score]}}"),
        TextColumn("{task.fields[speed]} images/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
        transient=transient,
    )
    bar.add_task("", total=total, completed=start, score="-", speed="-")
    bar.start()
    return bar
