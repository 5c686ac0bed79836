"""``python -m fedbench.report``: the tables and figures of run directories."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbench.options import ConfigError, require
from fedbench.report import scores
from fedbench.report.runs import Run, find_runs
from fedbench.report.summary import Options, group_runs, narrow, notes, results, unfinished
from fedbench.report.table import FORMATS, Table, render

SUFFIXES = {".md": "markdown", ".csv": "csv"}
EXAMPLES = """examples:
  python -m fedbench.report runs sweeps
  python -m fedbench.report sweeps --select best --target 0.9 --figures figures
  python -m fedbench.report sweeps --metric personal/auc --group algorithm,partition.alpha --out table.csv
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m fedbench.report",
        description="Tables (mean and spread over seeds, gain over Local, rounds to a target) and figures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("folders", nargs="*", help="folders with runs in or below them (default: runs and sweeps)")
    p.add_argument(
        "--metric", default="personal/accuracy", help="a column of metrics.csv (default: %(default)s)"
    )
    p.add_argument(
        "--select",
        choices=scores.SELECTIONS,
        default="last",
        help="the round that orders the rows and gives worst tenth and global (default: %(default)s)",
    )
    p.add_argument("--target", type=float, default=0.7, help="value to reach (default: %(default)s)")
    p.add_argument("--group", help="config keys to group by, with commas (default: everything but the seed)")
    p.add_argument("--format", choices=FORMATS, help="default: text, or what the suffix of --out says")
    p.add_argument("--out", type=Path, help="file to write the tables to, instead of printing them")
    p.add_argument("--figures", type=Path, metavar="DIR", help="folder to draw figures into")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 after a mistake told in one sentence."""
    args = parser().parse_args(argv)
    try:
        form = args.format or (SUFFIXES.get(args.out.suffix, "text") if args.out else "text")
        tables, drawn = overview(args, form)
        write(render(tables, form), args.out)
        for path in drawn:
            print(f"figure: {path}", file=sys.stderr)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def default_folders() -> list[Path]:
    """Where runs are when nobody says."""
    return [folder for folder in (Path("runs"), Path("sweeps")) if folder.is_dir()] or [Path("runs")]


def overview(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """The tables of all runs found, and the figures drawn."""
    runs = find_runs(args.folders or default_folders())
    options = Options(args.metric, args.select, args.target, args.group.split(",") if args.group else None)
    scores.check_metric(options.metric, runs)
    fraction = scores.is_fraction(options.metric)
    require(
        not fraction or options.target <= 1, f"--target is {options.target:g}; {options.metric} is at most 1"
    )
    groups, repeated = group_runs(runs, options.group)
    tables = _finished_tables(groups, runs, repeated, options, form)
    left = unfinished(runs)
    if left is not None and form != "csv":
        tables.append(left)
    drawn: list[Path] = []
    if args.figures:
        from fedbench.report.figures import draw

        drawn = draw(groups, runs, options, args.figures)
    return tables, drawn


def _finished_tables(
    groups: list, runs: list[Run], repeated: int, options: Options, form: str
) -> list[Table]:
    if not groups:
        return [Table("no run has finished yet", [])]
    wide = results(groups, runs, options)
    if form == "csv":
        return [wide]
    return [*narrow(wide, options), Table("", [], notes=notes(groups, repeated, options))]


def write(text: str, path: Path | None) -> None:
    """Print, or write a file and say so."""
    if path is None:
        print(text, end="")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"table: {path}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
