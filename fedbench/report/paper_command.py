"""``python -m fedbench paper``: the printed tables, one of them beside your runs of it, and runs of its rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.config.conf_tree import conf_dirs, group_options, nearest
from fedbench.config.paper_tables import read_tables
from fedbench.core.command import Arguments, arguments, command
from fedbench.core.options import require
from fedbench.core.suggest import suggested
from fedbench.report import paper
from fedbench.report.output import add_output, check_output, default_folders, finish, form_of, say_damage
from fedbench.report.runs import Run, find_runs, sound
from fedbench.report.summary import left_out, unfinished
from fedbench.report.table import FOR_PROGRAMS, Column, Table, render

EXAMPLES = """examples:
  python -m fedbench paper                          the tables
  python -m fedbench paper pgfed_table1_cifar
  python -m fedbench paper pgfed_table1_cifar sweeps --figures figures --out table.md
  python -m fedbench paper pgfed_table1_cifar --run --rows PGFed,FedPer seed=0,1,2
  python -m fedbench paper pgfed_table1_cifar --run --rows PGFed --reduced ten_rounds dataset.path=cifar10.npz

Every cell that was run: the printed value, the mean of the runs that answer it, and how far apart they are.  Then a
line for each column with the printed values of what was not run, and the command of each row."""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments("paper", "Compare a paper's table with your runs of it, cell by cell.", EXAMPLES)
    p.add_argument("paper", metavar="TABLE", nargs="?", help="name of the table; without one, all tables are listed")
    p.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="folders with runs in or below them (default: runs and sweeps); with --run: overrides, such as seed=0,1,2",
    )
    p.add_argument("--all", action="store_true", help="a line for every cell, run or not")
    p.add_argument("--run", action="store_true", help="run rows of the table as a sweep")
    p.add_argument("--rows", metavar="ROW,ROW", help="the rows to run (default: all)")
    p.add_argument("--reduced", metavar="NAME", help="run them in this reduced setting, such as ten_rounds")
    add_output(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_intermixed_args(argv)
    check_output(args)
    if args.run:
        return run_rows(args)
    idle = [f"--{name}" for name in ("rows", "reduced") if getattr(args, name) is not None]
    idle += [word for word in args.folders if "=" in word and not Path(word).exists()]
    require(not idle, f"{idle[0] if idle else ''} is for runs of a table's rows: add --run")
    form = form_of(args)
    tables, drawn = beside_paper(args, form) if args.paper else ([listed(args)], [])
    finish(args, render(tables, form), drawn)
    return 0


def run_rows(args: argparse.Namespace) -> int:
    """Run rows of a table as a sweep, as ``python -m fedbench -m`` does, and return the exit status."""
    require(args.paper is not None, "--run needs the name of a table: python -m fedbench paper lists them")
    names = chosen_rows(args.paper, args.rows, args.config_dir)
    if args.reduced is not None:
        settings = [name for name in group_options("experiment", conf_dirs(args.config_dir)) if "reduced/" in name]
        short = [name.removeprefix("reduced/") for name in settings]
        hint = nearest(args.reduced, short) or f" there are {', '.join(short)}"
        require(args.reduced in short, f"--reduced {args.reduced} is no reduced setting:{hint}")
        names = [f"[{name},reduced/{args.reduced}]" for name in names]
    from fedbench.app.launch import launch  # Hydra

    own = ["--config-dir", args.config_dir] if args.config_dir else []
    return launch([*own, "-m", f"+experiment={','.join(names)}", *args.folders])


def chosen_rows(table: str, rows: str | None, config_dir: str | None) -> list[str]:
    """Return the experiments of a table's rows, which go by their names or by those of the printed rows.

    Raises:
        ConfigError: There is no such table or row.
    """
    paper.read_table(table)
    by_name: dict[str, list[str]] = {}
    experiments = _rows(table, config_dir)
    for experiment in experiments:
        for name in [experiment.name.removeprefix(f"{table}/"), *experiment.methods]:
            by_name.setdefault(name.casefold(), []).append(experiment.name)
    require(bool(experiments), f"{table} has no rows to run: conf/paper has no file for it")
    if rows is None:
        return [experiment.name for experiment in experiments]
    chosen: dict[str, None] = {}
    for row in filter(None, (text.strip() for text in rows.split(","))):
        printed = [name for experiment in experiments for name in experiment.methods]
        hint = nearest(row, printed) or nearest(row, by_name) or f" it has {', '.join(dict.fromkeys(printed))}"
        require(row.casefold() in by_name, f"--rows {row} is no row of {table}:{hint}")
        chosen |= dict.fromkeys(by_name[row.casefold()])
    require(bool(chosen), "--rows names no row")
    return list(chosen)


def _rows(table: str, config_dir: str | None) -> list[paper.Experiment]:
    known = paper.experiments(conf_dirs(config_dir))
    return [experiment for experiment in known if experiment.name.startswith(f"{table}/")]


def listed(args: argparse.Namespace) -> Table:
    """Return the printed tables: what each is, its rows, and how many of its cells have a run in ./runs or ./sweeps."""
    found = read_tables(conf_dirs(args.config_dir))
    names = [name for name in paper.tables() if name in found]
    rows = [{"table": name, "title": found[name]["title"], "rows": len(found[name]["rows"])} for name in names]
    columns = [Column("table", "table"), Column("title", "title"), Column("rows", "rows", 0)]
    runs, _ = sound(find_runs(default_folders(), args.config_dir)) if default_folders() else ([], {})
    if runs:
        known = paper.experiments(conf_dirs(args.config_dir))
        for row in rows:
            row["cells"] = _coverage(row["table"], runs, known)
        columns.append(Column("cells", "cells run"))
    note = "python -m fedbench paper TABLE: its printed values, yours beside them, and the commands of its rows."
    return Table("printed tables", columns, rows, [note])


def _coverage(table: str, runs: list[Run], known: list[paper.Experiment]) -> str:
    cells = paper.compare(table, runs, known)
    done = {(cell.row["method"], cell.key) for cell in cells if cell.runs}
    return f"{len(done)} of {len({(cell.row['method'], cell.key) for cell in cells})}"


def beside_paper(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """Return a printed table beside our runs of it with remarks below, and the figures drawn."""
    name = args.paper
    paper.read_table(name)  # refuses a misspelt name before the runs are read
    require(0 <= args.target <= 1, f"--target is {args.target:g}; an accuracy is at most 1 and at least 0")
    folders = args.folders or default_folders()
    runs, damaged = sound(find_runs(folders, args.config_dir)) if folders else ([], {})
    known = paper.experiments(conf_dirs(args.config_dir))
    cells = paper.compare(name, runs, known, args.target)
    tables = [paper.cell_table(name, cells, tidy=True)]
    if form not in FOR_PROGRAMS:
        show_all = getattr(args, "all", False)  # ``report --paper`` has no such flag
        tables = [paper.cell_table(name, cells)] if show_all else _brief(name, cells, known)
        tables += paper.remarks(name, cells, runs, known, args.target)
        about = _about(name, args.config_dir)
        tables += [Table("", [], notes=about)] if about else []
        left = unfinished([run for run in runs if paper.is_of(name, run)])
        tables += [left] if left is not None else []
    say_damage(left_out(damaged, runs), tables, form)
    drawn: list[Path] = []
    if args.figures and cells:
        from fedbench.report.drawing import place_of
        from fedbench.report.figures import draw_paper

        drawn = [draw_paper(cells, place_of("--figures", args.figures).file(f"paper_{name}"))]
    return tables, drawn


def _brief(name: str, cells: list[paper.Cell], known: list[paper.Experiment]) -> list[Table]:
    """Return the cells that were run as a table, and those that were not as one line for each printed column."""
    if not cells:
        return [paper.cell_table(name, cells)]
    run = [cell for cell in cells if cell.runs]
    tables = [paper.cell_table(name, run)] if run else []
    title = f"{name}: {cells[0].row['paper']}, table {cells[0].row['table']}"
    varying = [i for i, _ in enumerate(paper.KEYS) if len({cell.key[i] for cell in cells}) > 1]
    columns: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.runs:
            std = f" ± {cell.row['std']}" if cell.row["std"] else ""
            able = next((e for e in known if paper.matches(e.paper, name, cell.row)), None)
            given = f" ({' '.join(able.given(cell.row))})" if able and able.given(cell.row) else ""
            column = (", ".join(cell.key[i] for i in varying) or "printed") + given
            columns.setdefault(column, []).append(f"{cell.row['method']} {cell.row['mean']}{std}")
    lines = [f"{column}: {', '.join(values)}" for column, values in columns.items()]
    lines = ["Not run, with the overrides and printed values (--all: a line for each cell):", *lines] if lines else []
    return [*tables, Table("" if run else title, [], notes=lines)] if lines or not run else tables


def _about(name: str, config_dir: str | None) -> list[str]:
    """Return the command of the whole table, its hardware and time, and its remarks."""
    table = read_tables(conf_dirs(config_dir)).get(name)
    if table is None:
        return []
    time = [f"Hardware and time: {table['time']}"] if "time" in table else []
    return [f"All rows: {suggested(table['command'])}", *time, *table.get("remarks", ())]
