"""``python -m fedbench report``: tables and figures of run folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.core.command import Arguments, arguments, command
from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.output import add_output, check_output, finish, form_of, readable_runs, say_damage
from fedbench.report.runs import Run
from fedbench.report.scores import Options
from fedbench.report.summary import Group, group_runs, left_out, notes, results, sent_table, unfinished
from fedbench.report.table import FOR_PROGRAMS, Table, render
from fedbench.report.words import told

EXAMPLES = """examples:
  python -m fedbench report runs sweeps
  python -m fedbench report sweeps --select best --target 0.9 --figures figures/best.pdf --out table.tex
  python -m fedbench report sweeps --metric personal/auc --group algorithm,partition.alpha --out table.csv
  python -m fedbench report sweeps --figures figures --against partition.alpha
  python -m fedbench report sweeps --paper pgfed_table1_cifar --figures figures
  python -m fedbench report sweeps/mu --choose algorithm.mu
"""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments(
        "report",
        "Tables (mean and spread over seeds, gain over Local, rounds to a target) and figures.",
        EXAMPLES,
    )
    p.add_argument("folders", nargs="*", help="folders with runs in or below them (default: runs and sweeps)")
    p.add_argument("--paper", metavar="TABLE", help="compare with this printed table, cell by cell: fedbench paper")
    p.add_argument("--metric", help="a column of metrics.csv (default: the score that the runs went by)")
    p.add_argument(
        "--select",
        choices=scores.SELECTIONS,
        default="last",
        help="the round that orders the rows and gives worst tenth and global (default: %(default)s)",
    )
    p.add_argument("--group", help="config keys to group by, with commas (default: everything but the seed)")
    p.add_argument(
        "--against",
        metavar="KEY",
        help="draw the metric over this config key too "
        "(partition.shots), or over what was sent (bytes, bytes_up, bytes_down)",
    )
    p.add_argument("--choose", metavar="KEY", help="the value of this config key that each client's validation part "
                                                   "prefers (algorithm.mu), as a list to paste")  # fmt: skip
    add_output(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args(argv)
    finish(args, *report(args))
    return 0


def report(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """The text that the parsed flags ask for, and the figures drawn; ConfigError for a mistake in the flags."""
    check_flags(args)
    form = form_of(args)
    tables_of = chosen if args.choose else beside_paper if args.paper else overview
    tables, drawn = tables_of(args, form)
    return render(tables, form), drawn


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that name nothing or would have no effect, and files that cannot be written."""
    for name in ("paper", "metric", "group", "against", "choose"):
        require(getattr(args, name) != "", f"--{name} '' names nothing: leave it out")
    require(
        args.group is None or all(args.group.split(",")),
        f"--group {args.group}: config keys with commas between them, such as algorithm,partition.alpha",
    )
    idle = [
        name
        for name in ("metric", "select", "group", "against")
        if args.paper and not args.choose and getattr(args, name) != parser().get_default(name)
    ]
    require(
        not idle,
        f"--paper {args.paper} prints a table of its own: leave out " + ", ".join(f"--{name}" for name in idle),
    )
    check_output(args)


def beside_paper(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """Return the tables of ``fedbench paper``, and the figures drawn."""
    from fedbench.report.paper_command import beside_paper

    return beside_paper(args, form)


def overview(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """Return the tables of all runs found, and the figures drawn."""
    runs, damaged = readable_runs(args)
    metric = args.metric or scores.primary_metric(runs)
    options = Options(metric, args.select, args.target, args.group.split(",") if args.group else None)
    scores.check_metric(metric, args.target, runs)
    groups, repeated = group_runs(runs, options.group)
    tables = [Table("no run has finished yet", [])]
    if groups:
        wide = results(groups, runs, options)
        tables = [wide] if form in FOR_PROGRAMS else for_readers(wide, groups, repeated, options)
    left = unfinished(runs)
    if left is not None and form not in FOR_PROGRAMS:
        tables.append(left)
    say_damage(left_out(damaged, runs), tables, form)
    return tables, draw_figures(args, groups, runs, options)


def for_readers(wide: Table, groups: list[Group], repeated: int, options: Options) -> list[Table]:
    """Return the tables without columns that tell no row from another, and an explanation of those left."""
    tables = [wide, sent_table(groups, wide, options)]
    tables = [told(table, list(groups[0].labels)) for table in tables if table is not None]
    shown = {column.key for table in tables for column in table.columns}
    return [*tables, Table("", [], notes=notes(groups, repeated, options, shown))]


def draw_figures(args: argparse.Namespace, groups: list[Group], runs: list[Run], options: Options) -> list[Path]:
    """Draw the figures that the flags ask for and return their paths."""
    against = args.against
    require(against is None or args.figures is not None, f"--against {against} draws a figure: give --figures a folder")
    if args.figures is None:
        return []
    from fedbench.report import figures, sent
    from fedbench.report.drawing import place_of

    place = place_of("--figures", args.figures)
    drawn = figures.draw(groups, runs, options, place)
    for setting, members in figures.by_setting(groups).items():
        if any(scores.is_compressed(run) for group in members for run in group.runs):
            drawn.append(sent.draw_sizes(members, place.file(f"sizes_{figures.file_name(setting)}"), setting))
    if against is not None:
        path = place.file(f"against_{figures.file_name(against, options.metric)}")
        draw_one = sent.draw_over_bytes if against in sent.DIRECTIONS else figures.draw_against
        drawn.append(draw_one(groups, options, against, path))
    return drawn


def chosen(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """The table of the values that clients choose."""
    from fedbench.report.choose import check_flags, choose

    check_flags(args, parser())
    runs, damaged = readable_runs(args)
    say_damage(left_out(damaged, []), [], "csv")
    return [choose(runs, args.choose, args.metric or scores.primary_metric(runs))], []
