"""A printed table beside our runs: every cell, how far apart, what has not been run and how to run it.

Which cells a run answers is said by the key ``paper`` of its experiment file: ``table`` (the name of a file
in fedbench/papers, or a list of them), then columns of that file and the value each must have (or a list of
values, or a pattern with *, or what it is under each of several overrides).  ``select`` (last, best, best_val, last3)
overrules the round that recipes.py takes.

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
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedbench.config.conf_tree import group_options, inherited
from fedbench.core.options import require
from fedbench.core.settings import is_matched
from fedbench.core.suggest import suggested
from fedbench.report.recipes import RECIPES, RELATIVE, Question, is_measured
from fedbench.report.runs import LOADER, Run
from fedbench.report.summary import IGNORED, over_seeds
from fedbench.report.table import Column, Spread, Table
from fedbench.report.words import label_columns, told

PAPERS = Path(__file__).resolve().parents[1] / "papers"
KEYS = (
    "setting",
    "dataset",
    "clients",
    "metric",
)  # one column of the printed table each; the method is a row
RESERVED = ("table", "select")
REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
LEAST = 3  # seeds, from which on a difference is measured by their std


@dataclass
class Cell:
    """A printed value and ours.

    Attributes:
        ours: Our value.  ``ours.std`` is the quantity of the paper's ±.
        sigma: Our standard deviation over seeds.
        overrides: Differences of the runs from their experiment file.
        reduced: Whether the runs use a second experiment file, of a reduced setting.
        tuned: Whether our value is after the final fine-tuning.
        clients: The number of clients in our mean, if some are left out.
    """

    row: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    overrides: str = ""
    reduced: bool = False
    ours: Spread = field(default_factory=lambda: Spread(float("nan"), None, 0, 0))
    sigma: float | None = None
    tuned: bool = False
    clients: str | None = None

    @property
    def printed(self) -> Spread:
        """The printed mean and std; std None where the paper has none."""
        std = self.row["std"]
        return Spread(float(self.row["mean"]), float(std) if std else None)

    @property
    def difference(self) -> float:
        """Our mean less the printed one."""
        return self.ours.mean - self.printed.mean

    @property
    def in_std(self) -> float:
        """The difference in multiples of our std over seeds; NaN below three seeds, and where only rounding differs."""
        spread = (self.sigma or 0.0) if self.ours.count >= LEAST else 0.0
        return self.difference / spread if spread > 1e-9 * abs(self.ours.mean) else float("nan")

    @property
    def key(self) -> tuple[str, ...]:
        """What names the cell in the paper's tables."""
        return tuple(self.row[name] for name in KEYS)


@dataclass(frozen=True)
class Experiment:
    """An experiment file's name and its ``paper`` block, as written (references are not resolved)."""

    name: str
    paper: dict[str, Any]

    @property
    def methods(self) -> list[str]:
        """The names of the printed rows that it answers."""
        named = self.paper.get("method", [])
        return [str(name) for name in (named if isinstance(named, list) else [named])]

    def given(self, row: dict[str, str]) -> list[str]:
        """Return the overrides under which the experiment answers a row: dataset=cifar10, partition.num_clients=25."""
        overrides = []
        for column, value in self.paper.items():
            reference = REFERENCE.match(str(value))
            if reference:
                overrides.append(f"{reference.group(1)}={row[column]}")
            elif isinstance(value, dict):
                overrides += [override for override, printed in value.items() if _equal(printed, row[column])]
        return overrides

    def chosen_by(self) -> set[str]:
        """The config keys that say which of its rows a run answers."""
        references = (REFERENCE.match(str(value)) for value in self.paper.values())
        mappings = (value for value in self.paper.values() if isinstance(value, dict))
        named = (str(override).partition("=")[0] for value in mappings for override in value)
        return {*named, *(match.group(1) for match in references if match)}


def tables() -> list[str]:
    """Names of the printed tables."""
    return sorted(p.stem for p in PAPERS.glob("*.csv") if {"method", "mean", "std", *KEYS} <= set(_header(p)))


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of a printed table; ConfigError with the nearest names for an unknown one."""
    known = tables()
    near = get_close_matches(name, known, 3, 0.3) or [t for t in known if name.split("_")[0] in t] or known
    is_other = name not in known and re.fullmatch(r"\w+", name) and (PAPERS / f"{name}.csv").is_file()
    require(
        not is_other,
        f"table {name}: fedbench/papers/{name}.csv has numbers of a figure or of a text, with columns of its own, "
        "and no cells that runs are compared with",
    )
    require(name in known, f"table {name}: no such table; the nearest are {', '.join(near)}")
    with (PAPERS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def is_named(paper: dict[str, Any], table: str) -> bool:
    """Whether a ``paper`` block is about this table."""
    named = paper.get("table")
    return table in (named if isinstance(named, list) else [named])


def is_of(table: str, run: Run) -> bool:
    """Whether a run says that it is for this table."""
    return is_named(run.config.get("paper") or {}, table)


def matches(paper: dict[str, Any], table: str, row: dict[str, str]) -> bool:
    """Whether a ``paper`` block says that its run answers this row; one without a method (a base) does not."""
    wanted = {column: value for column, value in paper.items() if column not in RESERVED}
    return (
        is_named(paper, table)
        and "method" in wanted
        and all(_equal(value, row.get(column)) for column, value in wanted.items())
    )


def _equal(wanted: Any, value: str | None) -> bool:
    if value is None or REFERENCE.match(str(wanted)):
        return value is not None
    options = list(wanted.values()) if isinstance(wanted, dict) else wanted if isinstance(wanted, list) else [wanted]
    return any(str(option) == value or fnmatchcase(value, str(option)) for option in options)


def block_of(run: Run) -> dict[str, Any]:
    """A run's ``paper`` block, in which a column of several overrides has the values of those that hold."""
    found = run.config.get("paper") or {}
    return {
        column: [printed for override, printed in value.items() if _holds(run, override)]
        if isinstance(value, dict) else value for column, value in found.items()
    }  # fmt: skip


def _holds(run: Run, override: str) -> bool:
    key, _, value = override.partition("=")
    return str(run.flat_config.get(f"choices.{key}", run.flat_config.get(key))) == value


def experiments(conf_dirs: Sequence[Path]) -> list[Experiment]:
    """Return the experiments of the conf folders that have, or inherit, a ``paper`` block, sorted by name."""
    names = group_options("experiment", conf_dirs)
    found = [Experiment(name, inherited(f"experiment/{name}", "paper", conf_dirs)) for name in names]
    return [experiment for experiment in found if experiment.paper]


def compare(name: str, runs: list[Run], known: list[Experiment], target: float = 0.7) -> list[Cell]:
    """The cells of a printed table that can be measured, each with our runs.

    A cell whose experiment was also run with other overrides (a reduced setting, a search) comes once for each of
    them, the plain one first; a cell without runs comes once, empty.
    """
    rows = [row for row in read_table(name) if is_measured(row["metric"])]
    finished = sorted((r for r in runs if r.finished), key=lambda r: str(r.summary.get("finished")))
    mine = [(r, block_of(r), departures(r, known)) for r in finished if is_of(name, r)]
    cells = []
    for row in rows:
        variants: dict[tuple[str, str], dict[Any, Run]] = {}
        for run, paper, changed in mine:
            if matches(paper, name, row):
                variants.setdefault(changed, {})[run.seed] = run
        for beside, changed in sorted(variants, key=lambda c: (any(c), -len(variants[c]), c)):
            given = " ".join(filter(None, (beside, changed)))
            cells.append(Cell(row, list(variants[beside, changed].values()), given, bool(beside)))
        if not variants:
            cells.append(Cell(row))
    for cell in cells:
        if cell.row["metric"] in RECIPES:
            _measure(cell, Question(name, cell.row, tuple(runs), target))
    _measure_relative(cells)
    return cells


def _measure(cell: Cell, question: Question) -> None:
    answers = [RECIPES[cell.row["metric"]](run, question) for run in cell.runs]
    cell.ours = over_seeds(answer.value for answer in answers)
    cell.sigma = cell.ours.std
    cell.tuned = any(run.tuned for run in cell.runs)
    counted = [answer.clients for answer in answers]
    cell.clients = ", ".join(dict.fromkeys(text or "all" for text in counted)) if any(counted) else None
    spreads = [answer.spread for answer in answers if answer.spread is not None]
    if spreads:
        cell.ours = replace(cell.ours, std=float(np.mean(spreads)))


def _measure_relative(cells: list[Cell]) -> None:
    """Fill the cells that compare methods, from the cells they are made of, under the same overrides."""
    by_method: dict[Any, dict[str, Spread]] = {}
    for cell in cells:
        if cell.ours.count:
            by_method.setdefault((cell.key, cell.overrides), {})[cell.row["method"]] = cell.ours
    for cell in cells:
        metric, compute = RELATIVE.get(cell.row["metric"], ("", None))
        if compute is not None:
            others = by_method.get(((*cell.key[:-1], metric), cell.overrides), {})
            own = others.get(cell.row["method"])
            if own is not None:
                means = {method: spread.mean for method, spread in others.items()}
                cell.ours = Spread(compute(own.mean, means), None, own.count, own.of)


def departures(run: Run, known: Iterable[Experiment]) -> tuple[str, str]:
    """What makes a run depart from its experiment file: files beside it (reduced/tenth), and overrides."""
    path = run.path / ".hydra" / "overrides.yaml"
    given = yaml.load(path.read_text(encoding="utf-8"), LOADER) or [] if path.is_file() else []
    names = str(run.choice("experiment")).split(",")
    mine = [e for e in known if e.name in names]
    chosen = {key for e in mine for key in e.chosen_by()}
    left = [_short(str(o)) for o in given if (key := str(o).lstrip("+~").split("=")[0]) not in chosen
            and not is_matched(key, (*IGNORED, "experiment"))]  # fmt: skip
    beside = [name for name in names[1:] if name not in {e.name for e in mine}]
    return " ".join(sorted(beside)), " ".join(sorted(left))


def _short(override: str) -> str:
    """dataset.path=cifar10_jpeg.npz: what was read, not where it lay."""
    return re.sub(r"^(dataset\.path=).*[/\\]", r"\1", override.lstrip("+").replace("'", ""))


def cell_table(
    name: str, cells: list[Cell], tidy: bool = False, wanted: Sequence[str] | None = None, title: str | None = None
) -> Table:
    """The cells as a table; columns that are the same everywhere are in its title only, unless it is tidy.

    wanted: keys of the columns to show (default: all); ConfigError for one that there is not.
    """
    if not cells:
        return Table(f"{name}: nothing in it is measured by a run", [])
    varying = [key for key in KEYS if len({cell.row[key] for cell in cells}) > 1]
    fixed = [f"{key} {cells[0].row[key]}" for key in KEYS if key not in varying]
    first = cells[0].row
    labels = [*label_columns(["method"]), *(Column(key, key) for key in (KEYS if tidy else varying))]
    if tidy or any(cell.overrides for cell in cells):
        labels.append(Column("overrides", "run with", none=""))
    numbers = [
        Column("printed", "printed"),
        Column("ours", "ours", none="not run"),
        Column("difference", "difference"),
        Column("in_std", "in our std", 1),
        Column("n", "n"),
    ]
    if any(cell.clients for cell in cells):
        numbers.append(Column("counted", "over clients", none=""))
    rows = [
        {key: cell.row[key] for key in ("method", *KEYS)} | {
            "overrides": cell.overrides or None, "printed": cell.printed, "ours": _ours(cell),
            "difference": cell.difference, "in_std": cell.in_std, "n": cell.ours.count, "counted": cell.clients,
            "tuned": cell.tuned}
        for cell in cells
    ]  # fmt: skip
    if title is None:
        title = f"{name}: {first['paper']}, table {first['table']}; {'; '.join(fixed)}"
    table = Table(title, [*labels, *numbers], rows)
    if wanted is not None:
        known = {column.key: column for column in [*labels, *(Column(key, key) for key in KEYS), *numbers]}
        odd = [key for key in wanted if key not in known]
        require(not odd, f"a table of {name} has no column {', '.join(odd)}; there are {', '.join(known)}")
        table.columns = [known[key] for key in wanted]
    return table if tidy else told(table, [c.key for c in table.columns if c not in numbers])


def _ours(cell: Cell) -> Spread | str | None:
    """Ours, None without a run, or what is missing in the runs there are."""
    return "not measured" if cell.runs and not cell.ours.count else cell.ours if cell.runs else None


def ranking_table(cells: list[Cell]) -> Table | None:
    """Kendall's tau between the printed order of the methods and ours, for each column of the table."""
    from scipy.stats import kendalltau  # half a second

    rows = []
    varying = [key for key in KEYS if len({cell.row[key] for cell in cells}) > 1]
    for key, changed in dict.fromkeys((c.key, c.overrides) for c in cells if c.ours.count):
        column = [c for c in cells if c.key == key and c.overrides == changed and c.ours.count]
        printed = len({c.row["method"] for c in cells if c.key == key})
        if len(column) > 1:
            tau, _ = kendalltau([c.printed.mean for c in column], [c.ours.mean for c in column])
            labels = {name: value for name, value in zip(KEYS, key) if name in varying}
            kept = "yes" if tau == 1 else "no"
            rows.append(
                labels
                | {"overrides": changed or None, "tau": tau, "kept": kept, "methods": f"{len(column)} of {printed}"}
            )
    if not rows:
        return None
    columns = [Column(name, name) for name in varying]
    if any(row["overrides"] for row in rows):
        columns.append(Column("overrides", "run with", none=""))
    columns += [Column("tau", "tau"), Column("kept", "order kept"), Column("methods", "methods compared")]
    return Table("ranking of the methods, Kendall's tau-b between printed and ours (1: the same order)", columns, rows)


def commands(name: str, cells: list[Cell], known: list[Experiment]) -> list[str]:
    """Return lines: how many cells are not run, the commands of the rows, and the cells without an experiment."""
    done = {(cell.row["method"], cell.key) for cell in cells if cell.runs and not cell.reduced}
    unique = {(cell.row["method"], cell.key): cell for cell in cells}
    missing = [cell for key, cell in unique.items() if key not in done]
    reduced = sum(cell.reduced for cell in missing)
    also = f" ({reduced} of them only in a reduced setting)" if reduced else ""
    lines = [f"{len(missing)} of {len(unique)} cells are not run{also}." if missing else "Every cell has a run."]
    answers = {key: [e for e in known if matches(e.paper, name, cell.row)] for key, cell in unique.items()}
    # a run may answer several tables: of several experiments that of this table
    rows = {sorted(able, key=lambda e: not e.name.startswith(f"{name}/"))[0].name for able in answers.values() if able}
    command = suggested("python -m fedbench")
    shown = [f"  {', '.join(e.methods)}: {command} +experiment={e.name}" for e in known
             if e.name in rows or e.name.startswith(f"{name}/")]  # fmt: skip
    lines += ["Commands of the rows:", *shown] if shown else []
    homeless = [unique[key] for key, able in answers.items() if not able and key not in done]
    if homeless:
        methods, sets = (", ".join(dict.fromkeys(c.row[key] for c in homeless)) for key in ("method", "dataset"))
        lines.append(f"{len(homeless)} cells have no experiment file (methods: {methods}; data sets: {sets}).")
    return lines


def strays(name: str, runs: list[Run]) -> list[str]:
    """Lines about runs that name this table but answer none of its rows: a misspelt method or data set."""
    rows = read_table(name)
    blocks = {run.path: block_of(run) for run in runs if is_of(name, run)}
    lost = {path: paper for path, paper in blocks.items() if not any(matches(paper, name, r) for r in rows)}
    return [f"{path} answers no cell: its key paper is {paper}." for path, paper in lost.items()]


def remarks(name: str, cells: list[Cell], runs: list[Run], known: list[Experiment], target: float) -> list[Table]:
    """Return the lines below the table: rankings, how to read it, what to run; empty if there are none."""
    if not cells:
        return []
    ranking = ranking_table(cells)
    lines = [[*paper_notes(cells, target), *strays(name, runs)], commands(name, cells, known)]
    return [*([ranking] if ranking else []), *(Table("", [], notes=each) for each in lines)]


def paper_notes(cells: list[Cell], target: float) -> list[str]:
    """What a reader of the comparison must know."""
    metrics = {cell.row["metric"] for cell in cells}
    counted = (
        "over clients: over how many our mean is, where a score is not defined for all (or eval.clients is given)."
    )
    lines = [
        *([counted] if any(cell.clients for cell in cells) else []),
        "printed: mean ± std as in the paper. ours: mean ± population std (ddof=0) over n seeds. in our std: "
        f"(ours - printed) / our std over seeds, from {LEAST} seeds on.",
    ]
    if any("std over clients" in metric for metric in metrics):
        lines.append("± of a gain is over clients, in both; each client is taken at its best round in both runs.")
    if metrics & {"BMCTA_pct", "BTA_pct"}:
        lines.append("BMCTA: mean over clients of the accuracy; BTA: accuracy over all clients' test samples together; "
                    "each at its own best round.")  # fmt: skip
    if metrics & {"rounds_to_target", "speedup_x_vs_slowest"}:
        lines.append(f"The paper does not state its target accuracy; ours is --target {target:g}.")
    return lines
