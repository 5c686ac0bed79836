"""Compare the printed table of a paper with runs, cell by cell.

The key ``paper`` of an experiment file states which cells its runs reproduce, that is, with which cells their scores
are compared.  ``table`` is the name of a file in fedbench/papers, or a list of names.  The other keys are columns of
that file with the value of the cells: a value, a list of values, a pattern with ``*``, a reference to a config key, or
a mapping from overrides to values.  ``select`` (last, best, best_val, last3) is the round, if it differs from that of
paper_metrics.py.

    paper:
      table: pgfed_table1_cifar
      method: PGFed
      dataset: {dataset=cifar10: CIFAR10, dataset=cifar100: CIFAR100}
      clients: ${partition.num_clients}
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.config.conf_tree import group_options, inherited
from fedbench.core.options import require
from fedbench.core.settings import is_matched
from fedbench.core.suggest import suggested
from fedbench.report.display import for_readers, label_columns
from fedbench.report.paper_metrics import METRICS, RELATIVE_METRICS, PrintedCell, is_measured
from fedbench.report.runs import Run, overrides_of
from fedbench.report.summary import IGNORED, over_seeds
from fedbench.report.table import Column, Spread, Table, pandas

PAPERS = Path(__file__).resolve().parents[1] / "papers"
KEYS = ("setting", "dataset", "clients", "metric")  # they identify a column of a printed table; methods are rows
REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
MIN_SEEDS = 3  # for a difference in standard deviations


@dataclass
class Cell:
    """A value printed in a table of a paper, as a row of its CSV file, and the value of our runs.

    Attributes:
        row: The row of the CSV file of the table.
        runs: The runs that reproduce the cell, one per seed.
        overrides: How the runs depart from their experiment file: names of further experiment files, and overrides.
        reduced: Whether the runs use a second experiment file with a reduced setting.
        ours: Our value.  Its standard deviation is over clients if that of the paper is, else over seeds.
        std_over_seeds: Our standard deviation over seeds.
        tuned: Whether our value is after fine-tuning.
        clients: How many clients the mean of each run includes, such as "3 of 6" or "all, 3 of 6"; None for all.
    """

    row: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    overrides: str = ""
    reduced: bool = False
    ours: Spread = field(default_factory=lambda: Spread(float("nan"), std=None, count=0, total=0))
    std_over_seeds: float | None = None
    tuned: bool = False
    clients: str | None = None

    @property
    def reported(self) -> Spread:
        """The printed mean and standard deviation; the latter is None if it is not printed."""
        std = self.row["std"]
        return Spread(float(self.row["mean"]), float(std) if std else None)

    @property
    def difference(self) -> float:
        """Our mean minus the printed one; NaN if no run reproduces the cell."""
        return self.ours.mean - self.reported.mean

    @property
    def difference_in_std(self) -> float:
        """Our mean minus the printed one, divided by our standard deviation over seeds.

        NaN for fewer than three seeds, or if the seeds differ by rounding only.
        """
        std = self.std_over_seeds or 0.0
        is_defined = self.ours.count >= MIN_SEEDS and std > 1e-9 * abs(self.ours.mean)
        return self.difference / std if is_defined else float("nan")

    @property
    def key(self) -> tuple[str, ...]:
        """(setting, dataset, clients, metric): the values that identify the column of the printed table."""
        return tuple(self.row[name] for name in KEYS)

    @property
    def position(self) -> tuple[str, ...]:
        """(method, setting, dataset, clients, metric): the values that identify the cell."""
        return (self.row["method"], *self.key)


@dataclass(frozen=True)
class Experiment:
    """An experiment file, with its key ``paper``: the printed table and the values of the cells that it reproduces.

    Attributes:
        name: The name of the experiment.
        paper: Its key ``paper``, which states the printed cells that it reproduces: the table, and by column of the
            table's CSV file the values of the cells.  References such as ${partition.num_clients} are not resolved.
    """

    name: str
    paper: dict[str, Any]

    @property
    def methods(self) -> list[str]:
        """The methods that the experiment runs, by their names in the printed table; [] if ``paper`` has no method."""
        return [str(name) for name in _as_list(self.paper.get("method", []))]

    def overrides(self, row: dict[str, str]) -> list[str]:
        """Return the overrides with which the experiment reproduces a cell, such as ["partition.num_clients=25"].

        Args:
            row: The cell: its row of the table's CSV file, values by column.
        """
        overrides = []
        for column, value in self.paper.items():
            if reference := REFERENCE.match(str(value)):  # ${key}: the column holds the value of a config key
                overrides.append(f"{reference.group(1)}={row[column]}")
            elif isinstance(value, dict):  # from an override to the column's value for it
                overrides += [override for override, reported in value.items() if _matches_value(reported, row[column])]
        return overrides

    def config_keys(self) -> set[str]:
        """Return the config keys that decide which cell a run reproduces, such as {"partition.num_clients"}."""
        keys = set()
        for value in self.paper.values():
            if reference := REFERENCE.match(str(value)):  # ${key}: the cell holds the value of a config key
                keys.add(reference.group(1))
            elif isinstance(value, dict):  # from an override to the cell's value for it
                keys |= {str(override).partition("=")[0] for override in value}
        return keys


def tables() -> list[str]:
    """Return the names of the printed tables that `fedbench paper` can compare with runs, sorted.

    They are the CSV files in fedbench/papers, without .csv, that have all columns of such a table.
    """
    columns = {"method", "mean", "std", *KEYS}
    return sorted(path.stem for path in PAPERS.glob("*.csv") if columns <= set(_read_csv(path)[0]))


@cache
def _read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each as a dict from column to value.  The result is cached."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of the CSV file of a printed table, a cell of the table each.

    Raises:
        ConfigError: There is no such table, or it has numbers of a figure or a text.
    """
    path = PAPERS / f"{name}.csv"
    names = tables()
    is_figure = name not in names and re.fullmatch(r"\w+", name) is not None and path.is_file()
    require(
        not is_figure,
        f"table {name}: fedbench/papers/{name}.csv has numbers of a figure or a text, which are not compared with "
        "runs; python -m fedbench paper lists the tables that are",
    )
    # similar names, else those with the same first word, such as the method, else all
    nearest = get_close_matches(name, names, n=3, cutoff=0.3) or [t for t in names if name.split("_")[0] in t] or names
    require(name in names, f"table {name}: no such table; the nearest are {', '.join(nearest)}")
    return _read_csv(path)


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and another value as a list of one."""
    return value if isinstance(value, list) else [value]


def names_table(paper: dict[str, Any], table: str) -> bool:
    """Return whether an experiment reproduces cells of a printed table.

    Args:
        paper: The value of the key ``paper`` of the experiment file.  paper["table"] is a name or a list of names.
        table: The name of the printed table, that of its file in fedbench/papers without .csv.
    """
    return table in _as_list(paper.get("table"))


def matches(paper: dict[str, Any], table: str, row: dict[str, str]) -> bool:
    """Return whether runs reproduce a cell of a printed table.

    Args:
        paper: The value of the key ``paper`` in their configuration, a dict.  Without a method in it, they reproduce no
            cell.
        table: The name of the table.
        row: The cell: its row of the table's CSV file, values by column.
    """
    # all but "table", and "select", the round at which the paper reports the metric
    columns = {column: value for column, value in paper.items() if column not in ("table", "select")}
    if "method" not in columns or not names_table(paper, table):
        return False
    return all(_matches_value(value, row.get(column)) for column, value in columns.items())


def _matches_value(expected: Any, value: str | None) -> bool:
    """Return whether the value of a column of a CSV file is one that an experiment's key ``paper`` states.

    Args:
        expected: What the key ``paper`` states for this column: a value, a pattern with ``*``, a list of them, a dict
            from override to value, or a reference such as ${partition.num_clients}, which any value matches.
        value: The value of the column; None if the CSV file has no such column.
    """
    if value is None or REFERENCE.match(str(expected)):
        return value is not None
    options = list(expected.values()) if isinstance(expected, dict) else _as_list(expected)
    return any(str(option) == value or fnmatchcase(value, str(option)) for option in options)


def paper_of(run: Run) -> dict[str, Any]:
    """Return the value of the key ``paper`` of a run.

    A dict from override to value, such as {dataset=cifar10: CIFAR10}, is replaced by the list of those values whose
    override agrees with the run's configuration.
    """
    config = run.flat_config

    def holds(override: str) -> bool:
        key, _, value = override.partition("=")
        return str(config.get(f"choices.{key}", config.get(key))) == value  # choices: the option of each group

    paper = dict(run.config.get("paper") or {})
    for column, value in paper.items():
        if isinstance(value, dict):
            paper[column] = [reported for override, reported in value.items() if holds(override)]
    return paper


def experiments(conf_dirs: Sequence[Path]) -> list[Experiment]:
    """Return the experiments that have or inherit a key ``paper``, sorted by name.

    Args:
        conf_dirs: Folders of options, such as conf; their subfolders ``experiment`` are searched.
    """
    names = group_options("experiment", conf_dirs)
    all_experiments = [Experiment(name, inherited(f"experiment/{name}", "paper", conf_dirs)) for name in names]
    return [experiment for experiment in all_experiments if experiment.paper]


def compare(name: str, runs: list[Run], available: list[Experiment], target: float = 0.7) -> list[Cell]:
    """Compare the cells of a printed table with runs.

    Cells with a metric that no run can have are left out.

    Args:
        name: The name of the printed table.
        runs: The runs.  Unfinished ones are not compared.
        available: The experiments with a key ``paper``.
        target: The accuracy to reach, for metrics of convergence.

    Returns:
        The cells.  A cell with runs in several settings occurs once per setting: first the setting of the paper, then
        those with departures from it.  A cell without runs occurs once.
    """
    finished = sorted((run for run in runs if run.finished), key=lambda run: str(run.summary.get("finished")))
    candidates = [  # (run, value of its key paper, its departures from the experiment file)
        (run, paper_of(run), departures(run, available))
        for run in finished if names_table(run.config.get("paper") or {}, name)
    ]  # fmt: skip
    cells = []
    for row in (row for row in read_table(name) if is_measured(row["metric"])):
        # by departures from the paper's setting (names of reduced settings, overrides) and then by seed, of which later
        # runs replace earlier ones
        settings: dict[tuple[str, str], dict[Any, Run]] = {}
        for run, paper, setting in candidates:
            if matches(paper, name, row):
                settings.setdefault(setting, {})[run.seed] = run
        # no departures first, then the setting with the most seeds
        for setting in sorted(settings, key=lambda s: (any(s), -len(settings[s]), s)):
            reduced, _ = setting
            cell = Cell(
                row,
                runs=list(settings[setting].values()),
                overrides=" ".join(filter(None, setting)),
                reduced=bool(reduced),
            )
            if row["metric"] in METRICS:  # metrics that one run has, such as an accuracy
                # all runs: a gain is computed from the run of Local, which is not in this cell
                _measure(cell, PrintedCell(name, row, tuple(runs), target))
            cells.append(cell)
        if not settings:
            cells.append(Cell(row))
    _measure_relative(cells)  # metrics that compare methods, from the values of the other cells
    return cells


def _measure(cell: Cell, reported: PrintedCell) -> None:
    """Set our value of a cell from its runs, with the fields that describe it.

    Args:
        cell: The cell; changed in place.
        reported: The printed cell, from which the metric takes the domain and the target.
    """
    measurements = [METRICS[cell.row["metric"]](run, reported) for run in cell.runs]
    cell.ours = over_seeds(measurement.value for measurement in measurements)
    cell.std_over_seeds = cell.ours.std
    cell.tuned = any(run.tuned for run in cell.runs)  # fine-tuned after the last round only
    clients = [measurement.clients for measurement in measurements]
    cell.clients = ", ".join(dict.fromkeys(text or "all" for text in clients)) if any(clients) else None
    # where the paper prints another standard deviation than that over seeds, such as over clients, the mean of it
    stds = [measurement.std for measurement in measurements if measurement.std is not None]
    if stds:
        cell.ours = replace(cell.ours, std=float(np.mean(stds)))


def _measure_relative(cells: list[Cell]) -> None:
    """Set our values of the cells whose metric compares methods, such as relative speed.

    They are computed from the other cells of the same column and the same overrides.  A cell has no value if a method
    with which it is compared has none: a speed-up over the slowest method needs all printed methods.
    """
    # key: the column of a cell, (setting, dataset, clients, metric); position: its method, then the key
    measured = {(*cell.position, cell.overrides): cell.ours for cell in cells if cell.ours.count}
    for cell in cells:
        if cell.row["metric"] in RELATIVE_METRICS:
            # the metric that is compared, and a function of a method's value and of the values of all methods
            metric, compute = RELATIVE_METRICS[cell.row["metric"]]
            column = (*cell.key[:-1], metric)  # the same column with this metric
            methods = {other.row["method"] for other in cells if other.key == column}
            spreads = {method: measured.get((method, *column, cell.overrides)) for method in methods}
            values = {method: spread.mean if spread else nan for method, spread in spreads.items()}
            ours = spreads.get(cell.row["method"])
            value = compute(ours.mean, values) if ours else nan
            if ours and not isnan(value):
                cell.ours = replace(ours, mean=value, std=None)


def departures(run: Run, available: Iterable[Experiment]) -> tuple[str, str]:
    """Return how a run departs from its experiment file.

    Args:
        run: The run.
        available: The experiments with a key ``paper``.

    Returns:
        Names of additional experiment files, such as reduced/tenth, and overrides, each separated by spaces.  Overrides
        that only choose the cell, the seed, or where and how the run was logged are left out.
    """
    names = str(run.choice("experiment")).split(",")
    used_experiments = [experiment for experiment in available if experiment.name in names]
    ignored = {key for experiment in used_experiments for key in experiment.config_keys()}  # keys that choose the cell
    overrides = []
    for override in map(str, overrides_of(run)):
        key = override.lstrip("+~").partition("=")[0]
        if key not in ignored and not is_matched(key, (*IGNORED, "experiment")):  # IGNORED: the seed, logging and so on
            # of a path, only the last part, which is the same on all machines
            short = re.sub(r"^(dataset\.path=).*[/\\]", r"\1", override.lstrip("+").replace("'", ""))
            overrides.append(short)
    # the first name is that of the experiment itself
    additional = set(names[1:]) - {experiment.name for experiment in used_experiments}
    return " ".join(sorted(additional)), " ".join(sorted(overrides))


def varying_keys(cells: list[Cell]) -> list[str]:
    """Return which of "setting", "dataset", "clients" and "metric", in this order, differ among cells; [] if none."""
    return [key for key in KEYS if len({cell.row[key] for cell in cells}) > 1]


def cell_table(
    name: str, cells: list[Cell], complete: bool = False, keys: Sequence[str] | None = None, title: str | None = None
) -> Table:
    """Return cells as a table.

    A true value under "tuned" marks a method with a dagger: our value is after fine-tuning.

    Args:
        name: The name of the printed table.
        cells: The cells.
        complete: Whether to keep the columns with equal cells.  If not, their values move to the title.
        keys: The keys of the columns; None for all.
        title: The title; None for the paper, the number of the table and the common values.

    Raises:
        ConfigError: There is no column with one of the keys.
    """
    if not cells:
        return Table(f"{name}: nothing in it is measured by a run", [])
    varying = varying_keys(cells)
    labels = [*label_columns(["method"]), *(Column(key, key) for key in (KEYS if complete else varying))]
    if complete or any(cell.overrides for cell in cells):
        labels.append(Column("overrides", "run with", missing=""))
    numbers = [
        Column("printed", "printed"),
        Column("ours", "ours", missing="not run"),
        Column("difference", "difference"),
        Column("in_std", "in our std", digits=1),
        Column("n", "n"),
    ]
    if any(cell.clients for cell in cells):
        numbers.append(Column("counted", "over clients", missing=""))
    rows = []
    for cell in cells:
        row: dict[str, Any] = {key: cell.row[key] for key in ("method", *KEYS)}
        row |= {"overrides": cell.overrides or None, "printed": cell.reported, "difference": cell.difference}
        row["ours"] = cell.ours if cell.ours.count else "not measured" if cell.runs else None
        row |= {"in_std": cell.difference_in_std, "n": cell.ours.count, "counted": cell.clients, "tuned": cell.tuned}
        rows.append(row)
    first = cells[0].row
    common = [f"{key} {first[key]}" for key in KEYS if key not in varying]
    title = f"{name}: {first['paper']}, table {first['table']}; {'; '.join(common)}" if title is None else title
    columns = {column.key: column for column in [*labels, *(Column(key, key) for key in KEYS), *numbers]}
    unknown = [key for key in keys or () if key not in columns]
    require(not unknown, f"a table of {name} has no column {', '.join(unknown)}; there are {', '.join(columns)}")
    shown_columns = [*labels, *numbers] if keys is None else [columns[key] for key in keys]
    table = Table(title, shown_columns, rows, name="cells")
    return table if complete else for_readers(table, [c.key for c in shown_columns if c not in numbers])


def ranking_table(cells: list[Cell]) -> Table | None:
    """Return Kendall's tau between the printed order of the methods and ours, for each column of a printed table.

    Returns:
        The table; None if no column has two methods with runs.
    """
    frame = pandas().DataFrame([cell.row | {"overrides": cell.overrides} for cell in cells])
    frame["printed"] = [cell.reported.mean for cell in cells]
    frame["ours"] = [cell.ours.mean if cell.ours.count else float("nan") for cell in cells]
    varying = varying_keys(cells)
    rows = []
    printed_methods = frame.groupby(list(KEYS))["method"].nunique()  # KEYS identify a column of the printed table
    for values, column in frame.dropna(subset="ours").groupby([*KEYS, "overrides"], sort=False):
        if len(column) > 1:
            labels: dict[str, Any] = dict(zip((*KEYS, "overrides"), values))
            tau = float(column["printed"].corr(column["ours"], method="kendall"))
            row = {key: labels[key] for key in varying} | {"overrides": labels["overrides"] or None}
            row |= {"tau": tau, "kept": "yes" if tau == 1 else "no"}
            rows.append(row | {"methods": f"{len(column)} of {printed_methods[values[:-1]]}"})
    if not rows:
        return None
    columns = [Column(name, name) for name in varying]
    if any(row["overrides"] for row in rows):
        columns.append(Column("overrides", "run with", missing=""))
    columns += [Column("tau", "tau"), Column("kept", "order kept"), Column("methods", "methods compared")]
    title = "ranking of the methods, Kendall's tau-b between printed and ours (1: the same order)"
    return Table(title, columns, rows, name="ranking")


def commands(name: str, cells: list[Cell], available: list[Experiment]) -> list[str]:
    """Return lines of text: how many cells were not run, commands that run cells, and cells without an experiment.

    Args:
        name: The name of the printed table.
        cells: Its cells.
        available: The experiments with a key ``paper``.
    """
    # position: method and column of a cell; reduced: the runs had a smaller setting than the paper
    positions_run = {cell.position for cell in cells if cell.runs and not cell.reduced}
    distinct = {cell.position: cell for cell in cells}
    missing = [cell for position, cell in distinct.items() if position not in positions_run]
    reduced = sum(cell.reduced for cell in missing)
    note = f" ({reduced} of them only in a reduced setting)" if reduced else ""
    lines = [f"{len(missing)} of {len(distinct)} cells are not run{note}." if missing else "Every cell has a run."]
    names = set()  # of experiments
    without = []
    for position, cell in distinct.items():
        suitable = [experiment for experiment in available if matches(experiment.paper, name, cell.row)]
        if suitable:  # prefer the experiments of this table to those of other tables
            names.add(min(suitable, key=lambda experiment: not experiment.name.startswith(f"{name}/")).name)
        elif position not in positions_run:
            without.append(cell)
    command = suggested("python -m fedbench")
    row_experiments = [e for e in available if e.name in names or e.name.startswith(f"{name}/")]
    lines += ["Commands of the rows:"] if row_experiments else []
    lines += [f"  {', '.join(e.methods)}: {command} +experiment={e.name}" for e in row_experiments]
    if without:
        methods, datasets = (", ".join(dict.fromkeys(c.row[key] for c in without)) for key in ("method", "dataset"))
        lines.append(f"{len(without)} cells have no experiment file (methods: {methods}; data sets: {datasets}).")
    return lines


def unmatched_runs(name: str, runs: list[Run]) -> list[str]:
    """Return a line of text for each run that names the table but reproduces none of its cells.

    A misspelt method in the key ``paper`` is a possible reason.

    Args:
        name: The name of the printed table.
        runs: The runs.
    """
    rows = read_table(name)
    lines = []
    for run in (run for run in runs if names_table(run.config.get("paper") or {}, name)):
        paper = paper_of(run)
        if not any(matches(paper, name, row) for row in rows):
            lines.append(f"{run.path} reproduces no cell of {name}: no row of the table has the values of its key "
                         f"paper, {paper}; correct this key in the experiment file")  # fmt: skip
    return lines


def paper_notes(cells: list[Cell], target: float) -> list[str]:
    """Return the explanations below a comparison, a line each.

    Args:
        cells: The cells, whose metrics are explained.
        target: The target of ``rounds_to_target``.
    """
    metrics = {cell.row["metric"] for cell in cells}
    lines = []
    if any(cell.clients for cell in cells):
        lines.append("over clients: the number of clients in our mean, if the score is undefined for some (or with "
                     "eval.clients).")  # fmt: skip
    lines.append("printed: mean ± std as in the paper. ours: mean ± population std (ddof=0) over n seeds. in our std: "
                 f"(ours - printed) / our std over seeds, from {MIN_SEEDS} seeds on.")  # fmt: skip
    if any("std over clients" in metric for metric in metrics):
        lines.append("± of a gain is over clients, in both; each client is taken at its best round in both runs.")
    if metrics & {"BMCTA_pct", "BTA_pct"}:
        lines.append("BMCTA: mean over clients of the accuracy; BTA: accuracy over all clients' test samples together; "
                     "each at its own best round.")  # fmt: skip
    if metrics & {"rounds_to_target", "speedup_x_vs_slowest"}:
        lines.append(f"The paper does not state its target accuracy; ours is --target {target:g}.")
    return lines
