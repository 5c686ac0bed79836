"""What ``fedbench report`` and ``fedbench paper`` share: flags, folders, and printing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbench.core.command import add_config_dir
from fedbench.core.destination import check_file, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import require
from fedbench.report.runs import Run, find_runs, sound
from fedbench.report.table import FOR_PROGRAMS, FORMATS, Table, one_line

SUFFIXES = {".txt": "text", ".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json", ".html": "html"}


def add_output(p: argparse.ArgumentParser) -> None:
    """Add the flags of both commands."""
    p.add_argument("--target", type=float, default=0.7, help="value to reach (default: %(default)s)")
    p.add_argument("--format", choices=FORMATS, help="default: text, or what the suffix of --out says")
    p.add_argument("--out", type=typed_path, help="file to write the tables to, instead of printing them")
    p.add_argument("--figures", type=typed_path, metavar="DIR[/NAME.pdf]",
                   help="folder to draw figures into (.png); with NAME.pdf or NAME.svg: as such files, "
                        "whose names begin with NAME")  # fmt: skip
    add_config_dir(p)


def check_output(args: argparse.Namespace) -> None:
    """Refuse a target that is no number, and files that cannot be written."""
    require(args.target == args.target, "--target must be a number, got nan")
    require(
        args.format is not None or args.out is None or args.out.suffix in ("", *SUFFIXES),  # none: a device
        f"--out {args.out}: a file's name ends in {', '.join(SUFFIXES)}, or --format says what it holds",
    )
    check_file("--out", args.out)
    if args.figures is not None:
        from fedbench.report.drawing import place_of  # NumPy apart, drawing loads nothing until it draws

        place_of("--figures", args.figures)


def form_of(args: argparse.Namespace) -> str:
    """Return the format of the tables."""
    return args.format or (SUFFIXES.get(args.out.suffix, "text") if args.out else "text")


def default_folders() -> list[Path]:
    """Return the folders to read if none is given: those of runs and sweeps that exist."""
    return [folder for folder in (Path("runs"), Path("sweeps")) if folder.is_dir()]


def readable_runs(args: argparse.Namespace) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs in the folders, and the damage of those that cannot be read."""
    return sound(find_runs(args.folders or default_folders() or ["runs"], args.config_dir))


def say_damage(lines: list[str], tables: list[Table], form: str) -> None:
    """Put lines about damage below the tables, or on standard error if the tables are for a program."""
    if form in FOR_PROGRAMS:
        for line in lines:
            print(one_line(line), file=sys.stderr)
    elif lines:
        tables.append(Table("", [], notes=lines))


def finish(args: argparse.Namespace, text: str, drawn: list[Path]) -> None:
    """Print the tables or write them to --out, and name the files written."""
    if args.out is None:
        print(text, end="")
    else:
        write_file("--out", args.out, lambda file: file.write(text.encode()))
        print(f"table: {args.out}", file=sys.stderr)
    for path in drawn:
        print(f"figure: {path}", file=sys.stderr)
