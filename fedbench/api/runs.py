"""Run and Runs, the results of `fedbench.run`, `fedbench.sweep` and `fedbench.load`."""

from __future__ import annotations

import html
import importlib.util
import math
from collections import UserList
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.config.targets import to_repeat
from fedbench.core.files import read_json
from fedbench.core.options import listed, require
from fedbench.report import runs as run_folders
from fedbench.report.scores import SELECTIONS
from fedbench.report.table import FORMATS
from fedbench.simulation.result import value_in
from fedbench.simulation.summary_text import clients_of

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn


class Run:
    """A run in its folder.  Each access reads the current files.

    Args:
        path: The run folder.
        config_dir: The --config-dir of the run, a folder with the user's own options.
        ran_here: Whether this process ran it.  Then `model` trusts the user's classes in its configuration.

    Raises:
        ConfigError: The folder is not a run folder.
    """

    def __init__(self, path: str | Path, config_dir: str | None = None, ran_here: bool = False) -> None:
        self.path = Path(path).absolute()
        require(
            (self.path / "config.yaml").is_file(),
            f"{path} is not a run folder: it has no config.yaml; name the folder of a run",
        )
        self._config_dir, self._ran_here = config_dir, ran_here

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as nested dicts.  Raises ConfigError if config.yaml is damaged."""
        return run_folders.Run(self.path).config

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: last and best scores, cost, versions; {} if there is none."""
        return read_json(self.path / "summary.json")

    @property
    def status(self) -> str:
        """The status: finished, paused, failed, interrupted or running.  A killed run stays running."""
        if (status := self.summary.get("status")) == "finished":
            return status
        return read_json(self.path / "status.json").get("status") or status or "running"

    @property
    def metrics(self) -> DataFrame:
        """metrics.csv as a DataFrame, with one row per evaluated round.  Needs pandas."""
        return run_folders.read_table(self.path / "metrics.csv")

    @property
    def clients(self) -> DataFrame:
        """clients.csv as a DataFrame, with one row per evaluated round and client.  Needs pandas."""
        return run_folders.read_table(self.path / "clients.csv")

    @property
    def costs(self) -> DataFrame:
        """costs.csv as a DataFrame, with one row per round: steps, samples, bytes, seconds.  Needs pandas."""
        return run_folders.read_table(self.path / "costs.csv")

    def model(self, client: int | str, *named: str, merged: bool = False) -> nn.Module:
        """Return the model that a client deploys, as a torch module on the CPU in evaluation mode.

        Args:
            client: The number of the client, 0 to N - 1, or its name if clients have names (clients.csv).
            *named: Your own classes in the run, as in "model._target_=my_package.MyNet", and pickles that you trust, as
                in "dataset.trust=MNIST".  Needed for loaded runs, because building a class runs its code.
            merged: Whether to merge an adapter into the weights of the model.

        Raises:
            ConfigError: The run has no checkpoint or no such client, or it has a class that is not listed in named.
        """
        from fedbench.tools import export  # torch

        is_valid = isinstance(client, int | str) or hasattr(client, "__index__")
        require(
            is_valid and not isinstance(client, bool),
            f"client must be the number or the name of a client, got {client!r}: give a number such as 0",
        )
        # a run of this process has already run the code of its classes, so they need not be listed again
        user_classes = to_repeat(self.config, self._config_dir) if self._ran_here else []
        sim = export.open_run(self.path, [*dict.fromkeys([*user_classes, *named])], self._config_dir)
        exists = not isinstance(client, str) or client in (sim.split.names or ())
        advice = (
            f"name one of {listed(sim.split.names)}"
            if sim.split.names
            else "the clients have no names, so give a number"
        )
        require(exists, f"client must be the number or the name of a client, got {client!r}; {advice}")
        return export.client_module(sim, client, merged)

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name} {value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        """Return an HTML table for IPython, with a row for each of method, data, seed, status, rounds, scores, path."""
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in self._facts())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) pairs that describe the run: method, data, seed, status, rounds, scores and path.

        A damaged run has only the status, with the damage, and the path.
        """
        run, summary = run_folders.Run(self.path), self.summary
        has_pandas = importlib.util.find_spec("pandas") is not None  # which reads the tables
        if has_pandas and (why := run_folders.damage_of(run)):
            yield from (("status", f"damaged: {why}"), ("path", shown(self.path)))
            return
        yield "method", run.method
        for group in ("dataset", "partition", "model"):
            yield group, str(run.choice(group))
        yield "seed", str(run.config.get("seed"))
        yield "status", self.status
        done = run_folders.rounds_of(run) if has_pandas else summary.get("rounds_done", 0)
        yield "rounds", f"{done} of {run.config.get('rounds')}"
        for name, title in (("last", "last"), ("best_val", "best by validation"), ("best", "best on test")):
            if math.isfinite(score := value_in(summary, name, run.primary)):
                values = summary[name] if name == "last" else summary[name]["values"]
                count = clients_of(summary, values, run.primary)  # "3 of 6" if the score is undefined for some, else ""
                yield f"{title} {run.primary}", f"{score:.4f}{count and f' ({count} clients)'}"
        yield "path", shown(self.path)


class Runs(UserList[Run]):
    """A list of runs.  A slice is a `Runs` too."""

    def table(
        self,
        metric: str | None = None,
        select: str = "last",
        target: float = 0.7,
        group: str | Sequence[str] | None = None,
        format: str = "text",
        paper: str | None = None,
        choose: str | None = None,
    ) -> Text:
        """Return the tables that ``python -m fedbench report`` prints of these runs.

        Args:
            metric: A column of metrics.csv; None for the primary metric of the runs.
            select: The round whose score sorts the rows, and at which the columns worst tenth and global are taken:
                "last", "best" (by test score) or "best_val" (by validation score).
            target: The score for the columns of rounds and seconds until a score is reached.
            group: Keys of the configuration by which runs are grouped; None for all keys but the seed.
            format: "text", "markdown", "csv", "latex", "json" or "html".
            paper: The table of a paper to compare with; None for the table of results.
            choose: A key of the configuration, for a table of the value with the best validation score of each client;
                None for the table of results.

        Raises:
            ConfigError: There are no runs, or an argument is invalid.
        """
        from fedbench.report.command import parser, report

        require(bool(self.data), "there are no runs for a table: this list of runs is empty; load a folder with runs")
        for name, value, allowed in (("select", select, SELECTIONS), ("format", format, tuple(FORMATS))):
            require(value in allowed, f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
        args = parser().parse_args([])
        args.folders = [shown(run.path) for run in self.data]
        args.group = group if group is None or isinstance(group, str) else ",".join(group)
        args.metric, args.select, args.target, args.format = metric, select, float(target), format
        args.paper, args.choose = paper, choose
        args.config_dir = next((run._config_dir for run in self.data if run._config_dir), None)
        text, _ = report(args)  # and the paths of figures, of which there are none
        return Text(text)

    def __repr__(self) -> str:
        return f"Runs([{', '.join(map(repr, self.data))}])"

    def _repr_html_(self) -> str:
        """Return an HTML table for IPython, with a row for each run: method, data, status, scores and so on."""
        facts = [dict(run._facts()) for run in self.data]
        names = list(dict.fromkeys(name for fact in facts for name in fact))
        head = _html_row(names, "th")
        body = [_html_row([fact.get(name, "") for name in names], "td") for fact in facts]
        return f"<table>{head}{''.join(body)}</table>"


def _html_row(cells: Sequence[str], tag: str) -> str:
    """Return a row of an HTML table.

    Args:
        cells: The texts of the cells, not escaped.
        tag: The HTML tag of a cell: "th" for headings, "td" for values.
    """
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in cells)}</tr>"


class Text(str):
    """A text that notebooks show without quotes."""

    def __repr__(self) -> str:
        return str(self)


def shown(path: Path) -> str:
    """Return a path as text: relative to the working directory if it is inside of that, else as given."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
