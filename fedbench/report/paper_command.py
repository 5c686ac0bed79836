"""``python -m fedbench paper``: a printed table beside your runs of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.config.conf_tree import conf_dirs
from fedbench.core.command import Arguments, arguments, command
from fedbench.core.options import require
from fedbench.report import paper
from fedbench.report.output import add_output, check_output, default_folders, finish, form_of, say_damage
from fedbench.report.runs import find_runs, sound
from fedbench.report.summary import left_out, unfinished
from fedbench.report.table import Table, render

EXAMPLES = """examples:
  python -m fedbench paper pgfed_table1_cifar
  python -m fedbench paper pgfed_table1_cifar sweeps --figures figures --out table.md

Every cell: the printed value, the mean of the runs that answer it, and how far apart they are.  Below the table: the
commands of the cells that have not been run.  Tables are the files of fedbench/papers."""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments("paper", "Compare a paper's table with your runs of it, cell by cell.", EXAMPLES)
    p.add_argument("paper", metavar="TABLE", help="name of the table, such as pgfed_table1_cifar")
    p.add_argument("folders", nargs="*", help="folders with runs in or below them (default: runs and sweeps)")
    add_output(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args(argv)
    check_output(args)
    tables, drawn = beside_paper(args, form := form_of(args))
    finish(args, render(tables, form), drawn)
    return 0


def beside_paper(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """Return a printed table beside our runs of it with remarks below, and the figures drawn."""
    name = args.paper
    paper.read_table(name)  # refuses a misspelt name before the runs are read
    require(0 <= args.target <= 1, f"--target is {args.target:g}; an accuracy is at most 1 and at least 0")
    folders = args.folders or default_folders()
    runs, damaged = sound(find_runs(folders, args.config_dir)) if folders else ([], {})
    known = paper.experiments(conf_dirs(args.config_dir))
    cells = paper.compare(name, runs, known, args.target)
    tables = [paper.cell_table(name, cells, tidy=form == "csv")]
    if form != "csv":
        tables += paper.remarks(name, cells, runs, known, args.target)
        left = unfinished([run for run in runs if paper.is_of(name, run)])
        tables += [left] if left is not None else []
    say_damage(left_out(damaged, runs), tables, form)
    drawn: list[Path] = []
    if args.figures and cells:
        from fedbench.report.drawing import place_of
        from fedbench.report.figures import draw_paper

        drawn = [draw_paper(cells, place_of("--figures", args.figures).file(f"paper_{name}"))]
    return tables, drawn
