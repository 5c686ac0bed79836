"""What the user sees of a run: a bar on a terminal, one line that changes in a notebook, a line now and then elsewhere;
and the closing screen.

Nothing else in the round loop prints.
"""

from __future__ import annotations

import importlib
import math
import re
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from fedbench.core.suggest import suggested
from fedbench.simulation.result import primary_of
from fedbench.simulation.run_folder import config_dir_of

LINES = 20  # a run prints about so many where there is no terminal
NOT_THE_SAME = ("algorithm", "seed", "hydra", "name")  # keys in which compared runs differ
REDRAWN = 0.1  # s at least between two states of a notebook's line


class Progress:
    """Round, score, images/s and time left of a run of ``total_rounds``, ``start_round`` of them done.

    ``label`` names one run of several at once, which get lines (in a notebook one each) and no bar; ``primary``: the
    name of the score.
    """

    def __init__(self, total_rounds: int, start_round: int = 0, label: str = "", primary: str = "accuracy") -> None:
        self.total, self.start, self.primary = total_rounds, start_round, primary
        self.every = max(1, math.ceil(total_rounds / LINES))
        self._began = time.monotonic()
        self._bar = _bar(total_rounds, start_round, primary) if sys.stdout.isatty() and not label else None
        self._line = None if self._bar else notebook_line()
        self.label = f"{label}  " if label else ""

    def update(self, round: int, score: float | None, images_per_s: float) -> None:
        """Show that ``round`` (from 1) is done; ``score`` is None or NaN while unknown."""
        known = score is not None and not math.isnan(score)
        fields = {"score": f"{score:.4f}" if known else "-", "speed": f"{images_per_s:,.0f}"}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=round, **fields)
        elif self._line is not None:
            self._line.show(self._text(round, fields), last=round == self.total)
        elif round in (self.start + 1, self.total) or round % self.every == 0:
            print(self._text(round, fields), flush=True)

    def _text(self, round: int, fields: dict[str, str]) -> str:
        seconds_left = (time.monotonic() - self._began) / (round - self.start) * (self.total - round)
        return (
            f"{self.label}round {round:>{len(str(self.total))}}/{self.total}  {self.primary} {fields['score']:>6}  "
            f"{fields['speed']:>9} images/s  {duration(seconds_left)} left"
        )

    def note(self, text: str) -> None:
        """A line of text, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NullProgress:
    """In place of a progress bar in processes that do not print: shows nothing."""

    def update(self, round: int, score: float | None, images_per_s: float) -> None:
        """Nothing."""

    def __enter__(self) -> NullProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class NotebookLine:
    """A line in the output of a notebook's cell; what is shown takes the place of what was.

    display: IPython's function of that name.
    """

    def __init__(self, display: Any) -> None:
        self._display, self._handle, self._shown = display, None, -math.inf

    def show(self, text: str, last: bool = False) -> None:
        """Show a text, unless another one was shown a moment ago; the last one in any case."""
        now = time.monotonic()
        if not last and now - self._shown < REDRAWN:
            return
        self._shown, line = now, {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)


def notebook_line() -> NotebookLine | None:
    """A line where standard output is that of a notebook's cell; None on a terminal, and where it goes to a file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None or not type(sys.stdout).__module__.startswith("ipykernel"):
        return None
    return NotebookLine(importlib.import_module("IPython.display").display)


def _bar(total: int, start: int, primary: str) -> Any:
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
    )
    bar.add_task("", total=total, completed=start, score="-", speed="-")
    bar.start()
    return bar


def ending(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the closing screen of a run from its summary: what ran, what came out, what to do next."""
    path = Path(run_dir)
    typeable = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    print("\n" + "\n".join(ending_lines(summary, typeable)), flush=True)


def ending_line(summary: dict[str, Any], run_dir: Path) -> str:
    """Return one line about a finished cell of a sweep."""
    name = primary_of(summary)
    shown = last_and_best(summary["last"], summary.get("best_val") or {"values": {}}, f"personal/{name}")
    count = clients_of(summary, summary["last"], f"personal/{name}")
    words = [f"{shown[0]} last", *([f"{shown[1]} best by validation"] if summary.get("best_val") else [])]
    over = f" ({count} clients)" if count else ""
    return f"{run_dir.name}: mean personalized {name} {', '.join(words)}{over}"


def ending_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """The lines of the closing screen."""
    s, cost = summary, summary["cost"]
    last, best, name = s["last"], s["best"] or {"round": s["rounds"], "values": s["last"]}, primary_of(s)
    table = [
        ("", "last", "best"),
        ("round", str(s["rounds"]), str(best["round"])),
        (f"mean personalized {name}", *last_and_best(last, best, f"personal/{name}")),
        *_client_row(s, last, best["values"], f"personal/{name}"),
        ("  spread over clients (std)", *last_and_best(last, best, f"personal/{name}_std")),
        ("  worst tenth of the clients", *last_and_best(last, best, f"personal/{name}_worst")),
        (f"global {name}", *last_and_best(last, best, f"global/{name}")),
    ]
    width = max(len(row[0]) for row in table)
    shown = [f"  {label:<{width}}  {a:>8}  {b:>8}" for label, a, b in table]
    shown[-1] += global_note(s)
    return [
        f"{s['name']} on {s['dataset']}, {s['partition']} partition: {s['num_clients']} clients, "
        f"{s['cohort']} a round, {s['rounds']} rounds, model {s['model']}, seed {s['seed']}",
        *shown,
        *new_client_lines(s.get("new_clients"), name),
        *privacy_lines(s.get("privacy")),
        f"  {cost['images_per_s']:,.0f} images/s of local training, {duration(cost['total_s'])} in all; "
        f"{sent(cost, 'down')}, {sent(cost, 'up')}",
        f"  a client's round: {kib(cost['bytes_down'], s)} down, {kib(cost['bytes_up'], s)} up, on average",
        f"files: {run_dir}  (metrics.csv, clients.csv, costs.csv, summary.json, checkpoint.pt)",
        "next:",
        *next_lines(s, run_dir),
    ]


def sent(cost: dict[str, float], direction: str) -> str:
    """The megabytes that all clients together sent or were sent, and what compression made them of."""
    size, dense = cost[f"bytes_{direction}"], cost.get(f"dense_{direction}")
    of_dense = f" ({100 * size / dense:,.1f}% of uncompressed)" if dense and dense != size else ""
    return f"{size / 1e6:,.1f} MB {direction}{of_dense}"


def last_and_best(last: dict[str, float], best: dict[str, Any], name: str) -> tuple[str, str]:
    """A metric at the last and at the best round, as text."""
    values = (last.get(name), best["values"].get(name))
    return tuple("-" if v is None or math.isnan(v) else f"{v:.4f}" for v in values)  # type: ignore[return-value]


def clients_of(summary: dict[str, Any], values: dict[str, float], metric: str) -> str:
    """Return how many clients are in a mean, as "3 of 6"; "" if all are."""
    from fedbench.tasks.scores import COUNT  # NumPy

    everybody = summary.get("num_clients")
    counted = values.get(f"{metric}{COUNT}", summary.get("evaluated_clients", everybody))
    return "" if counted == everybody else f"{counted:.0f} of {everybody}"


def _client_row(
    summary: dict[str, Any], last: dict[str, float], best: dict[str, float], metric: str
) -> list[tuple[str, str, str]]:
    """Return the line of the final screen with the number of clients in the means, if some are left out."""
    counted = [clients_of(summary, values, metric) for values in (last, best)]
    return [("  clients in these means", counted[0] or "all", counted[1] or "all")] if any(counted) else []


def kib(total: int, s: dict[str, Any]) -> str:
    """Bytes of a run as those of one client in one round."""
    return f"{total / max(1, s['rounds'] * s['cohort']) / 1024:,.1f} KiB"


def global_note(summary: dict[str, Any]) -> str:
    """What the row of the global score needs said."""
    if f"global/{primary_of(summary)}" not in summary["last"]:
        return "  none: this method has no global model"
    same = summary.get("personal_is_global")
    return "  personal equals global: all clients use one model" if same else ""


def new_client_lines(result: dict[str, Any] | None, primary: str = "accuracy") -> list[str]:
    """What clients that took no part reached with the global model, if there are any."""
    if not result:
        return []
    over = f" over {result['counted']} of them" if "counted" in result else ""
    return [
        f"  {result['count']} new clients: mean {primary}{over} {result['epoch0']:.4f} as they start, "
        f"{result['best']:.4f} at best, after {result['best_epoch']} of {result['epochs']} epochs of their own"
    ]


def privacy_lines(privacy: dict[str, Any] | None) -> list[str]:
    """What the noise on uploads came to, and what it promises, if there was any."""
    if not privacy:
        return []
    releases = f"a client uploaded {privacy['releases']} tensors at most"
    epsilon = privacy["epsilon_spent"]
    total = f", (epsilon, delta) = ({epsilon:.4g}, {privacy['delta']:g}) in all" if epsilon is not None else ""
    first, *rest = clauses(privacy["guarantee"])
    return [f"  privacy: {releases}{total}; {first}", *(f"    {clause}" for clause in rest)]


def clauses(sentence: str) -> list[str]:
    """A long sentence in lines: its parts between semicolons."""
    *parts, last = sentence.split("; ")
    return [*(f"{part};" for part in parts), last]


def next_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """The commands worth typing after this run, each with its reason; what was run by a class's name is no option."""
    algorithm, dataset, classes = summary["algorithm"], summary["dataset"], summary.get("classes") or {}
    runs = run_dir.parents[2] if run_dir.parts[-3:-1] == (algorithm, dataset) else run_dir.parent
    methods = ",".join(dict.fromkeys(["local", "fedavg", *([] if "algorithm" in classes else [algorithm])]))
    folder, words = typed(run_dir)
    same = [word for word in words if re.split(r"[.=]", word.lstrip("+~"))[0] not in NOT_THE_SAME]
    if not words and dataset != "digits":  # in other hands than the command line's
        same = [f"dataset={dataset}"]
    own = [] if folder is None else ["--config-dir", folder]
    sweep = shlex.join(["python", "-m", "fedbench", *own, "-m", f"algorithm={methods}", "seed=0,1,2", *same])
    commands = {
        f"python -m fedbench report {shlex.quote(str(runs))}": "tables of your runs",
        **({} if "dataset" in classes and not words else {sweep: "compare methods over seeds"}),
        "python -m fedbench --help": "methods, data sets, options",
    }
    typed_so = [suggested(command) for command in commands]
    width = min(max(map(len, typed_so)), 72)
    return [f"  {command:<{width}}  {why}" for command, why in zip(typed_so, commands.values(), strict=True)]


def typed(run_dir: Path) -> tuple[str | None, list[str]]:
    """Return the --config-dir and the overrides of a run's command."""
    return config_dir_of(run_dir), [str(word) for word in _yaml(run_dir / ".hydra" / "overrides.yaml") or ()]


def _yaml(path: Path) -> Any:
    """What a YAML file holds, as it stands; None where there is none."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def duration(seconds: float) -> str:
    """12 s, 3:05 or 2:03:45."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
