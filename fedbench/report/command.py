"""``python -m fedbench report``: tables and figures of run folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.core.command import Arguments, arguments, command
from fedbench.core.options import require
from fedbench.report import scores
from fedbench.report.display import for_readers
from fedbench.report.output import add_output, as_output, check_output, format_of, report_damage, runs_of, write_output
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs, notes, results, sent_table, unfinished
from fedbench.report.table import MACHINE_FORMATS, OBJECT, Table

EXAMPLES = """examples:
  python -m fedbench report runs sweeps
  python -m fedbench report sweeps --select best --target 0.9 --figures figures/best.pdf --out table.tex
  python -m fedbench report sweeps --metric personal/auc --group algorithm,partition.alpha --out table.csv
  python -m fedbench report sweeps --figures figures --against partition.alpha
  python -m fedbench report sweeps --paper pgfed_table1_cifar --figures figures
  python -m fedbench report sweeps --choose
  python -m fedbench report sweeps/mu --choose algorithm.mu
  python -m fedbench report sweeps --clients --figures figures
  python -m fedbench report sweeps --client 7
  python -m fedbench report sweeps --compare pgfed fedavg
"""
EACH_METHOD = "each method"  # --choose without a key
CLIENTS = ("clients", "client")  # the flags of fedbench.report.clients


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench report``."""
    p = arguments(
        "report",
        "Tables (mean and spread over seeds, gain over Local, rounds to a target) and figures.",
        EXAMPLES,
    )
    p.add_argument("folders", nargs="*", help="folders with runs in or below them (default: runs and sweeps)")
    p.add_argument("--paper", metavar="TABLE", help="compare with this table of a paper, like fedbench paper")
    p.add_argument("--metric", help="a column of metrics.csv (default: the primary metric of the runs)")
    p.add_argument(
        "--select",
        choices=scores.SELECTIONS,
        default="last",
        help="the round whose score sorts the rows, and at which worst tenth and global are taken "
        "(default: %(default)s)",
    )
    p.add_argument("--group", help="config keys to group by, separated by commas (default: all but the seed)")
    p.add_argument(
        "--against",
        metavar="KEY",
        help="also draw the metric over this config key (partition.shots), or over communication (bytes, bytes_up, "
        "bytes_down)",
    )
    p.add_argument(
        "--choose",
        metavar="KEY",
        nargs="?",
        const=EACH_METHOD,
        help="for each method, the options with the best mean validation score; with KEY (algorithm.mu): for each "
        "client, the value of this config key with its best validation score, as a list to paste",
    )
    p.add_argument(
        "--compare",
        nargs="+",
        metavar="METHOD",
        help="differences of these methods, paired over seeds, with tests; one method: against every other one",
    )
    p.add_argument("--clients", action="store_true", help="tables of single clients, sorted by their gain over Local")
    p.add_argument("--client", metavar="CLIENT", help="the score of one client, by number or name, over the rounds")
    add_output(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench report`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_args(argv)
    write_output(args, *report(args))
    return 0


def report(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """Return the text of the tables and the paths of the figures.

    Args:
        args: The parsed command line.

    Raises:
        ConfigError: An argument is invalid, or there are no runs.
    """
    check_flags(args)
    table_format = format_of(args)
    if args.choose == EACH_METHOD:  # --choose without a config key
        tables, figures = tuning_tables(args, table_format), []
    elif args.choose:  # --choose KEY
        from fedbench.report.choose import choose_command

        tables, figures = choose_command(args), []
    elif args.compare:
        from fedbench.report.compare import compare_methods

        tables, figures = compare_methods(args, table_format)
    elif args.paper:
        from fedbench.report.paper_command import compare_command

        tables, figures = compare_command(args, table_format)
    elif args.clients or args.client is not None:
        from fedbench.report.clients import clients_command

        tables, figures = clients_command(args, table_format)
    else:
        tables, figures = overview(args, table_format)
    return as_output(tables, table_format, figures), figures


def check_flags(args: argparse.Namespace) -> None:
    """Check that the values of the flags are valid, and that no flag is given that has no effect.

    Raises:
        ConfigError: A value is invalid, or two flags exclude each other.
    """
    # CLIENTS: the names of the flags --clients and --client
    examples = {"paper": "apple_practical", "metric": "accuracy", "group": "algorithm", "against": "fedavg"}
    for name, example in (examples | {"choose": "optimizer.lr", "client": "3"}).items():
        problem = f"--{name} is empty: give it a value, as in --{name} {example}, or leave it out"
        require(getattr(args, name) != "", problem)
    require(
        args.group is None or all(args.group.split(",")),
        f"--group {args.group} must be config keys separated by commas, such as algorithm,partition.alpha",
    )
    if args.choose == EACH_METHOD:  # --choose without a key
        require(
            args.select != "best",
            "--select best chooses a round by its test score, and --choose must not read test scores: use last or "
            "best_val",
        )
        refuse_flags(args, "choose", ("paper", "compare", "target", "group", "figures", "against", *CLIENTS))
    elif args.choose:
        require(
            not Path(args.choose).is_dir(),
            f"--choose {args.choose}: this is a folder, and --choose may be followed by a config key; give the folders "
            "first: report FOLDER --choose",
        )
        names = ("paper", "compare", "select", "target", "group", "figures", "against", *CLIENTS)
        refuse_flags(args, "choose", names)
    elif args.compare:
        refuse_flags(args, "compare", ("paper", "target", "against", *CLIENTS))
        require(
            args.select != "best",
            "--compare cannot be combined with --select best, which chooses the round by test scores: choose last or "
            "best_val",
        )
    elif args.paper:
        refuse_flags(args, "paper", ("metric", "select", "group", "against", *CLIENTS))
    elif args.client is not None:
        refuse_flags(args, "client", ("select", "target", "against", "clients"))
    elif args.clients:
        refuse_flags(args, "clients", ("target", "against"))
    require(
        args.against is None or args.figures is not None,
        f"--against {args.against} draws a figure: add --figures FOLDER",
    )
    check_output(args)


def refuse_flags(args: argparse.Namespace, flag: str, names: tuple[str, ...]) -> None:
    """Raise ConfigError if flags are given that have no effect together with another flag.

    Args:
        args: The parsed command line.
        flag: The other flag, without dashes.
        names: The flags without effect, without dashes.
    """
    # A flag counts as given if its value is not the default.
    given_flags = [f"--{name}" for name in names if getattr(args, name) != parser().get_default(name)]
    require(
        not given_flags,
        f"{given_flag(args, flag)} cannot be combined with {', '.join(given_flags)}: leave out these flags",
    )


def given_flag(args: argparse.Namespace, flag: str) -> str:
    """Return a flag with its value as the user typed it.

    Args:
        args: The parsed command line.
        flag: The flag, without dashes.
    """
    value = getattr(args, flag)
    if value in (EACH_METHOD, True):  # the flag was typed without a value
        return f"--{flag}"
    return f"--{flag} {' '.join(value) if isinstance(value, list) else value}"


def tuning_tables(args: argparse.Namespace, table_format: str) -> list[Table]:
    """Return the tables of ``fedbench report --choose`` without a key, for each method its best options.

    Args:
        args: The parsed command line.
        table_format: The format of the tables.  It decides where notes about damaged runs are printed.
    """
    from fedbench.report.tuning import choice_table

    runs, damaged = runs_of(args)
    tables = [choice_table(runs, args.metric or scores.primary_metric(runs), args.select)]
    if table_format not in (*MACHINE_FORMATS, OBJECT):
        tables = [for_readers(tables[0], ["method"])]  # without columns that are equal in all rows
    report_damage(damaged, [], tables, table_format)  # []: clients.csv, which may be damaged too, is not read
    return tables


def overview(args: argparse.Namespace, table_format: str) -> tuple[list[Table], list[Path]]:
    """Return the tables of ``fedbench report`` without ``--choose`` and ``--paper``, and the paths of its figures.

    The tables are the results, the communication of compressed runs, the notes, and the unfinished runs.  CSV and JSON
    have the results only.

    Args:
        args: The parsed command line.
        table_format: The format of the tables.
    """
    runs, damaged = runs_of(args)
    metric = args.metric or scores.primary_metric(runs)
    options = Options(metric, args.select, args.target, args.group.split(",") if args.group else None)
    scores.check_metric(metric, args.target, runs)
    groups, repeated = group_runs(runs, options.group)  # repeated: the number of runs that later ones replace
    tables = [results(groups, runs, options)] if groups else [Table("no run has finished yet", [])]
    if table_format not in MACHINE_FORMATS:  # a table for readers, or OBJECT: one JSON object of all tables (--json)
        if groups:
            labels = list(groups[0].labels)
            communication = sent_table(groups, tables[0], options)  # None if no run was compressed
            tables += [communication] if communication is not None else []
            if table_format != OBJECT:
                # without columns that are equal in all rows or repeat others
                tables = [for_readers(table, labels) for table in tables]
            shown_columns = {column.key for table in tables for column in table.columns}
            tables.append(Table("", [], notes=notes(groups, repeated, options, shown_columns)))
        open_runs = unfinished(runs)
        tables += [open_runs] if open_runs is not None else []
    report_damage(damaged, runs, tables, table_format)
    if args.figures is None:
        return tables, []
    from fedbench.report.drawing import figure_files
    from fedbench.report.figures import draw_report

    return tables, draw_report(groups, runs, options, figure_files("--figures", args.figures), args.against)
