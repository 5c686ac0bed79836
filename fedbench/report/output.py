"""Flags, input folders and output of ``fedbench report`` and ``fedbench paper``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from fedbench.core.command import add_config_dir, add_json
from fedbench.core.destination import check_file, write_file
from fedbench.core.files import typed_path
from fedbench.core.json_output import json_text
from fedbench.core.options import require
from fedbench.report.runs import Run, find_runs, readable
from fedbench.report.summary import damage_notes
from fedbench.report.table import FORMATS, MACHINE_FORMATS, OBJECT, Table, as_object, escape_control, render

SUFFIXES = {".txt": "text", ".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json", ".html": "html"}


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --target, --format, --json, --out, --figures and --config-dir, which report and paper have in common."""
    parser.add_argument("--target", type=float, default=0.7,
                        help="value of the metric for rounds and time to reach it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--format", choices=[*FORMATS], help="default: by the suffix of --out, else text")
    add_json(parser)
    parser.add_argument("--out", type=typed_path, help="file to write the tables to, instead of printing them")
    parser.add_argument("--figures", type=typed_path, metavar="DIR[/NAME.pdf]",
                        help="folder for figures (.png); with NAME.pdf or NAME.svg: figures of that format, "
                             "whose names begin with NAME")  # fmt: skip
    add_config_dir(parser)


def check_output(args: argparse.Namespace) -> None:
    """Check the values of ``--target``, ``--out`` and ``--figures``.

    Raises:
        ConfigError: The target is NaN, a suffix is unknown, or a file cannot be written.
    """
    require(args.target == args.target, "--target must be a number, got nan: give a value of the metric, such as 0.8")
    require(
        args.format is not None or args.out is None or args.out.suffix in ("", *SUFFIXES),  # devices have no suffix
        f"--out {args.out}: the name of the file must end in {', '.join(SUFFIXES)}; or choose a --format",
    )
    require(
        not args.json or args.format is None,
        f"--json prints all tables and notes as one object, and --format {args.format} selects another output: leave "
        "out one of them",
    )
    require(
        not args.json or args.out is None or args.out.suffix in ("", ".json"),
        f"--json --out {args.out}: the name of the file must end in .json",
    )
    check_file("--out", args.out)
    if args.figures is not None:
        from fedbench.report.drawing import figure_files  # matplotlib is not imported until a figure is drawn

        figure_files("--figures", args.figures)


def format_of(args: argparse.Namespace) -> str:
    """Return the format of the tables, such as "csv".

    The first of these decides: ``--json``, ``--format``, the suffix of ``--out``.  Without any, it is "text".
    """
    if args.json:
        return OBJECT  # one JSON object with all tables and notes
    return args.format or (SUFFIXES.get(args.out.suffix, "text") if args.out else "text")


def default_folders() -> list[Path]:
    """Return those of the folders ./runs and ./sweeps, in this order, that exist; [] if none."""
    return [folder for folder in (Path("runs"), Path("sweeps")) if folder.is_dir()]


def runs_of(args: argparse.Namespace) -> tuple[list[Run], dict[Path, str]]:
    """Return the intact runs in the given (or default) folders, and a dict from each damaged run's path to its damage.

    Args:
        args: The parsed command line with ``folders`` and ``config_dir``.
    """
    # without the default folders runs and sweeps, the error of find_runs names "runs"
    return readable(find_runs(args.folders or default_folders() or ["runs"], args.config_dir))


def report_damage(damaged: Mapping[Path, str], runs: list[Run], tables: list[Table], table_format: str) -> None:
    """Append lines about damaged runs to the tables; for CSV and JSON, print the lines on standard error instead.

    Args:
        damaged: What is damaged in each unreadable run, by its path.
        runs: The readable runs, whose clients.csv may be damaged.
        tables: The tables; changed in place.
        table_format: The format of the tables.
    """
    lines = damage_notes(damaged, runs)
    if table_format in MACHINE_FORMATS:
        for line in lines:
            print(escape_control(line), file=sys.stderr)
    elif lines:
        tables.append(Table("", [], notes=lines))


def as_output(tables: list[Table], table_format: str, figures: list[Path]) -> str:
    """Return the tables as text.

    Args:
        tables: The tables.
        table_format: A format of `table.render`, or "object" for one JSON object with tables, notes and figures.
        figures: The paths of the figures, for the JSON object.
    """
    if table_format == OBJECT:
        return json_text("report", {**as_object(tables), "figures": figures})
    return render(tables, table_format)


def write_output(args: argparse.Namespace, text: str, figures: list[Path]) -> None:
    """Print the tables or write them to --out, and print the names of written files on standard error.

    Args:
        args: The parsed command line.
        text: The tables as text, in their final format.
        figures: The paths of the figures, which are written already.
    """
    if args.out is None:
        print(text, end="")
    else:
        write_file("--out", args.out, lambda file: file.write(text.encode()))
        print(f"table: {args.out}", file=sys.stderr)
    for path in figures:
        print(f"figure: {path}", file=sys.stderr)
