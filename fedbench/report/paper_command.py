"""``python -m fedbench paper``: list the printed tables, compare one with runs, or run its rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.config.conf_tree import conf_dirs, group_options, nearest
from fedbench.config.paper_tables import read_tables
from fedbench.core.command import Arguments, arguments, command
from fedbench.core.json_output import JSON_FLAG
from fedbench.core.options import require
from fedbench.core.suggest import suggested
from fedbench.report import paper
from fedbench.report.output import (
    add_output,
    as_output,
    check_output,
    default_folders,
    format_of,
    report_damage,
    write_output,
)
from fedbench.report.runs import Run, find_runs, readable
from fedbench.report.summary import unfinished
from fedbench.report.table import MACHINE_FORMATS, OBJECT, Column, Table

EXAMPLES = """examples:
  python -m fedbench paper                          the tables
  python -m fedbench paper pgfed_table1_cifar
  python -m fedbench paper pgfed_table1_cifar sweeps --figures figures --out table.md
  python -m fedbench paper pgfed_table1_cifar --run --rows PGFed,FedPer seed=0,1,2
  python -m fedbench paper pgfed_table1_cifar --run --rows PGFed --reduced ten_rounds dataset.path=cifar10.npz

The command prints each cell with runs: the printed value, the mean over the runs, and the difference.  Then it prints
the values of each column that were not run, and the command of each row."""


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench paper``."""
    p = arguments("paper", "Compare a table of a paper with your runs, cell by cell.", EXAMPLES)
    p.add_argument("paper", metavar="TABLE", nargs="?", help="name of the table (default: list all tables)")
    p.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="folders with runs in or below them (default: runs and sweeps); with --run: overrides, such as seed=0,1,2",
    )
    p.add_argument("--all", action="store_true", help="a line for every cell, with and without runs")
    p.add_argument("--run", action="store_true", help="run rows of the table as a sweep")
    p.add_argument("--rows", metavar="ROW,ROW", help="the rows to run (default: all)")
    p.add_argument("--reduced", metavar="NAME", help="run them in this reduced setting, such as ten_rounds")
    add_output(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench paper`` with the words typed after it, and return the exit status.

    It is 0, or with ``--run`` that of the sweep that is started, and 2 after a mistake of the user.
    """
    args = parser().parse_intermixed_args(argv)
    check_output(args)
    if args.run:
        return run_rows(args)
    misplaced = [f"--{name}" for name in ("rows", "reduced") if getattr(args, name) is not None]
    misplaced += [word for word in args.folders if "=" in word and not Path(word).exists()]
    require(not misplaced, f"{', '.join(misplaced)} is for runs of a table's rows: add --run")
    table_format = format_of(args)
    tables, figures = compare_command(args, table_format) if args.paper else ([list_tables(args.config_dir)], [])
    write_output(args, as_output(tables, table_format, figures), figures)
    return 0


def run_rows(args: argparse.Namespace) -> int:
    """Run rows of a table as a sweep, like ``python -m fedbench -m``, and return the exit status.

    ``--reduced NAME`` adds the experiment file reduced/NAME, with a smaller setting than the paper's.

    Args:
        args: The parsed command line.  Its ``folders`` are overrides of all runs, such as seed=0,1,2.
    """
    require(args.paper is not None, "--run needs the name of a table: python -m fedbench paper lists them")
    names = chosen_rows(args.paper, args.rows, args.config_dir)
    if args.reduced is not None:
        options = group_options("experiment", conf_dirs(args.config_dir))
        settings = [name.removeprefix("reduced/") for name in options if "reduced/" in name]
        hint = nearest(args.reduced, settings) or f" there are {', '.join(settings)}"
        require(args.reduced in settings, f"--reduced {args.reduced} is not a reduced setting:{hint}")
        names = [f"[{name},reduced/{args.reduced}]" for name in names]
    from fedbench.app.launch import launch  # slow to import

    config_dir = ["--config-dir", args.config_dir] if args.config_dir else []
    flags = [JSON_FLAG] if args.json else []
    return launch([*config_dir, *flags, "-m", f"+experiment={','.join(names)}", *args.folders])


def chosen_rows(table: str, rows: str | None, config_dir: str | None) -> list[str]:
    """Return the names of the experiments that run rows of a paper's table, such as table/row.

    Args:
        table: The table.
        rows: The names of rows or of printed methods, separated by commas; None for all rows.
        config_dir: A folder with the user's own options.

    Raises:
        ConfigError: There is no such table or row.
    """
    paper.read_table(table)  # raises ConfigError for an unknown table
    available = paper.experiments(conf_dirs(config_dir))
    experiments = [experiment for experiment in available if experiment.name.startswith(f"{table}/")]
    require(bool(experiments), f"{table} has no rows to run: conf/paper has no file for it")
    if rows is None:
        return [experiment.name for experiment in experiments]
    by_name: dict[str, list[str]] = {}
    for experiment in experiments:
        for name in (experiment.name.removeprefix(f"{table}/"), *experiment.methods):
            by_name.setdefault(name.casefold(), []).append(experiment.name)
    methods = list(dict.fromkeys(method for experiment in experiments for method in experiment.methods))
    chosen: list[str] = []
    for row in filter(None, (text.strip() for text in rows.split(","))):
        hint = nearest(row, methods) or nearest(row, by_name) or f" it has {', '.join(methods)}"
        require(row.casefold() in by_name, f"--rows {row} is not a row of {table}:{hint}")
        chosen += by_name[row.casefold()]
    require(bool(chosen), f"--rows is empty: give rows of {table} separated by commas, or leave it out")
    return list(dict.fromkeys(chosen))


def list_tables(config_dir: str | None) -> Table:
    """Return a table of the printed tables: their titles, rows, and how many cells have runs in ./runs or ./sweeps.

    The last column is left out if these folders have no runs.

    Args:
        config_dir: A folder with the user's own options.
    """
    descriptions = read_tables(conf_dirs(config_dir))
    names = [name for name in paper.tables() if name in descriptions]
    rows = [
        {"table": name, "title": descriptions[name]["title"], "rows": len(descriptions[name]["rows"])} for name in names
    ]
    columns = [Column("table", "table"), Column("title", "title"), Column("rows", "rows", digits=0)]
    runs, _ = _runs(default_folders(), config_dir)
    if runs:
        available = paper.experiments(conf_dirs(config_dir))
        for row in rows:
            cells = paper.compare(row["table"], runs, available)
            positions_run = {cell.position for cell in cells if cell.runs}
            row["cells"] = f"{len(positions_run)} of {len({cell.position for cell in cells})}"
        columns.append(Column("cells", "cells run"))
    note = "python -m fedbench paper TABLE: its printed values, yours beside them, and the commands of its rows."
    return Table("printed tables", columns, rows, [note], name="tables")


def _runs(folders: list[Path], config_dir: str | None) -> tuple[list[Run], dict[Path, str]]:
    """Return the intact runs in folders, and what is damaged in each other run by its path.

    Without folders, both are empty.  With folders that contain no run, ConfigError is raised.
    """
    return readable(find_runs(folders, config_dir)) if folders else ([], {})


def compare_command(args: argparse.Namespace, table_format: str) -> tuple[list[Table], list[Path]]:
    """Return a printed table beside our runs with its notes, and the paths of the figures.

    Args:
        args: The parsed command line of ``fedbench paper`` or ``fedbench report --paper``.
        table_format: The format of the tables.  CSV and JSON have the cells only.
    """
    name = args.paper
    paper.read_table(name)  # a misspelt name is reported before the runs are read
    require(0 <= args.target <= 1, f"--target is {args.target:g}; an accuracy is a fraction: give a value from 0 to 1")
    runs, damaged = _runs(args.folders or default_folders(), args.config_dir)
    available = paper.experiments(conf_dirs(args.config_dir))
    cells = paper.compare(name, runs, available, args.target)
    if table_format in (*MACHINE_FORMATS, OBJECT):  # OBJECT: --json, one object with all tables and notes
        tables = [paper.cell_table(name, cells, complete=True)]
    else:
        all_cells = not cells or getattr(args, "all", False)  # fedbench report has no flag --all
        tables = [paper.cell_table(name, cells)] if all_cells else _compact_tables(name, cells, available)
    if table_format not in MACHINE_FORMATS:
        if cells:
            ranking = paper.ranking_table(cells)
            notes = [*paper.paper_notes(cells, args.target), *paper.unmatched_runs(name, runs)]
            tables += [ranking] if ranking else []
            tables += [Table("", [], notes=notes), Table("", [], notes=paper.commands(name, cells, available))]
        description = read_tables(conf_dirs(args.config_dir)).get(name)
        if description is not None:
            time = [f"Hardware and time: {description['time']}"] if "time" in description else []
            notes = [f"All rows: {suggested(description['command'])}", *time, *description.get("remarks", ())]
            tables.append(Table("", [], notes=notes))
        open_runs = unfinished([run for run in runs if paper.names_table(run.config.get("paper") or {}, name)])
        tables += [open_runs] if open_runs is not None else []
    report_damage(damaged, runs, tables, table_format)
    if args.figures is None or not cells:
        return tables, []
    from fedbench.report.drawing import figure_files
    from fedbench.report.figures import draw_paper

    return tables, [draw_paper(cells, figure_files("--figures", args.figures).path(f"paper_{name}"))]


def _compact_tables(name: str, cells: list[paper.Cell], available: list[paper.Experiment]) -> list[Table]:
    """Return the cells with runs as a table, and the printed values of other cells as one line per column.

    Args:
        name: The name of the printed table.
        cells: Its cells, at least one.
        available: The experiments, which give the overrides to run a column.
    """
    varying = paper.varying_keys(cells)
    columns: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if not cell.runs):
        matching = (experiment for experiment in available if paper.matches(experiment.paper, name, cell.row))
        experiment = next(matching, None)
        overrides = experiment.overrides(cell.row) if experiment else []
        column = ", ".join(cell.row[key] for key in varying) or "printed"
        column += f" ({' '.join(overrides)})" if overrides else ""
        std = f" ± {cell.row['std']}" if cell.row["std"] else ""
        columns.setdefault(column, []).append(f"{cell.row['method']} {cell.row['mean']}{std}")
    lines = [f"{column}: {', '.join(values)}" for column, values in columns.items()]
    if lines:
        lines.insert(0, "Not run, with the overrides and printed values (--all: a line for each cell):")
    with_runs = [cell for cell in cells if cell.runs]
    if not with_runs:
        return [Table(f"{name}: {cells[0].row['paper']}, table {cells[0].row['table']}", [], notes=lines)]
    return [paper.cell_table(name, with_runs), *([Table("", [], notes=lines)] if lines else [])]
