"""What `fedbench.run`, `.sweep` and `.load` return: runs as objects, which read their folders when they are asked."""

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
from fedbench.core.options import require
from fedbench.report import runs as folders
from fedbench.report.scores import SELECTIONS
from fedbench.report.table import FORMATS
from fedbench.simulation.result import value_in
from fedbench.simulation.summary_text import clients_of

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn


class Run:
    """A run's folder: finished, failed, interrupted, or under way in some process; everything is read as it is now.

    path: the folder.  config_dir: the user's own options, as the run was given them.  own: whether this process has run
    it, so that classes of the user's own are known to be theirs; of a run that was loaded they must be named (`model`).
    """

    def __init__(self, path: str | Path, config_dir: str | None = None, own: bool = False) -> None:
        self.path = Path(path).absolute()
        require((self.path / "config.yaml").is_file(), f"{path} is not a run: it has no config.yaml")
        self._config_dir, self._own = config_dir, own

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, nested; ConfigError where it is damaged."""
        return folders.Run(self.path).config

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says: last and best scores, costs, versions; empty if there is none."""
        return read_json(self.path / "summary.json")

    @property
    def status(self) -> str:
        """finished, failed, interrupted or running (also where the process was killed)."""
        if (status := self.summary.get("status")) == "finished":
            return status
        return read_json(self.path / "status.json").get("status") or status or "running"

    @property
    def metrics(self) -> DataFrame:
        """metrics.csv: a row for each evaluated round; needs pandas."""
        return folders.read_table(self.path / "metrics.csv")

    @property
    def clients(self) -> DataFrame:
        """clients.csv: a row for each evaluated round and client; needs pandas."""
        return folders.read_table(self.path / "clients.csv")

    @property
    def costs(self) -> DataFrame:
        """costs.csv: a row for each round: steps, samples, bytes, seconds; needs pandas."""
        return folders.read_table(self.path / "costs.csv")

    def model(self, client: int | str, *named: str, merged: bool = False) -> nn.Module:
        """Return the model that a client deploys, as a plain torch module on the CPU in evaluation mode.

        Args:
            client: 0 to N - 1, or its name if clients have names (clients.csv).
            *named: Your own classes, as in "model._target_=my_package.MyNet", and a pickle that you trust
                ("dataset.trust=MNIST").  A loaded run builds only the classes that they or this installation's options
                name.
            merged: Whether to add an adapter to the weights of the bare model.

        Raises:
            ConfigError: The run has no checkpoint or no such client, or it needs a class that is not named.
        """
        from fedbench.tools import export  # torch

        whole = isinstance(client, int | str) or hasattr(client, "__index__")
        require(whole and not isinstance(client, bool), f"client must be the number of a client, got {client!r}")
        theirs = to_repeat(self.config, self._config_dir) if self._own else []
        sim = export.open_run(self.path, [*dict.fromkeys([*theirs, *named])], self._config_dir)
        is_known = not isinstance(client, str) or client in (sim.split.names or ())
        require(is_known, f"client must be the number of a client, or its name where it has one, got {client!r}")
        return export.client_module(sim, client, merged)

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name} {value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        """IPython's: a table of two columns."""
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in self._facts())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """What a reader sees of the run: (name, value)."""
        run, summary = folders.Run(self.path), self.summary
        has_pandas = importlib.util.find_spec("pandas") is not None  # which reads the tables
        if has_pandas and (why := folders.fault(run)):
            yield from (("status", f"damaged: {why}"), ("path", shown(self.path)))
            return
        yield "method", run.method
        for group in ("dataset", "partition", "model"):
            yield group, str(run.choice(group))
        yield "seed", str(run.config.get("seed"))
        yield "status", self.status
        done = folders.rounds_of(run) if has_pandas else summary.get("rounds_done", 0)
        yield "rounds", f"{done} of {run.config.get('rounds')}"
        for name, title in (("last", "last"), ("best_val", "best by validation"), ("best", "best on test")):
            if math.isfinite(score := value_in(summary, name, run.primary)):
                values = summary[name] if name == "last" else summary[name]["values"]
                over = clients_of(summary, values, run.primary)
                yield f"{title} {run.primary}", f"{score:.4f}{over and f' ({over} clients)'}"
        yield "path", shown(self.path)


class Runs(UserList[Run]):
    """Runs in their order.  A slice of them is a `Runs` too."""

    def table(
        self,
        metric: str | None = None,
        select: str = "last",
        target: float = 0.7,
        group: str | Sequence[str] | None = None,
        form: str = "text",
        paper: str | None = None,
        choose: str | None = None,
    ) -> Text:
        """What ``python -m fedbench report`` prints of these runs; the parameters are its flags (--help explains them).

        metric: a column of metrics.csv.  select: last, best or best_val.  target: a value to reach.  group: keys of the
        configuration.  form: text, markdown, csv, latex, json or html.  Raises ConfigError.
        """
        from fedbench.report.command import parser, report

        require(bool(self.data), "there are no runs to make a table of")
        for name, value, allowed in (("select", select, SELECTIONS), ("form", form, FORMATS)):
            require(value in allowed, f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
        args = parser().parse_args([])
        args.folders = [shown(run.path) for run in self.data]
        args.group = group if group is None or isinstance(group, str) else ",".join(group)
        args.metric, args.select, args.target, args.format = metric, select, float(target), form
        args.paper, args.choose = paper, choose
        args.config_dir = next((run._config_dir for run in self.data if run._config_dir), None)
        return Text(report(args)[0])

    def __repr__(self) -> str:
        return f"Runs([{', '.join(map(repr, self.data))}])"

    def _repr_html_(self) -> str:
        """IPython's: a row for each run."""
        facts = [dict(run._facts()) for run in self.data]
        names = list(dict.fromkeys(name for one in facts for name in one))
        lines = [names, *([one.get(name, "") for name in names] for one in facts)]
        cells = ["".join(f"<t{'dh'[i == 0]}>{html.escape(cell)}</t{'dh'[i == 0]}>" for cell in line)
                 for i, line in enumerate(lines)]  # fmt: skip
        return f"<table>{''.join(f'<tr>{cell}</tr>' for cell in cells)}</table>"


class Text(str):
    """Text that a notebook shows as it is, not in quotes."""

    def __repr__(self) -> str:
        return str(self)


def shown(path: Path) -> str:
    """A path as one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
