"""``python -m fedbench.report``: the tables and figures of run directories."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbench.core.destination import check_file, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, refused, require
from fedbench.core.streams import lasting
from fedbench.report import scores
from fedbench.report.runs import find_runs, sound
from fedbench.report.sent import DIRECTIONS, draw_over_bytes, draw_sizes, is_compressed, sent_table
from fedbench.report.summary import Options, group_runs, left_out, narrow, notes, results, unfinished
from fedbench.report.table import FORMATS, Table, one_line, render

SUFFIXES = {".txt": "text", ".md": "markdown", ".csv": "csv", ".tex": "latex"}
EXAMPLES = """examples:
  python -m fedbench.report runs sweeps
  python -m fedbench.report sweeps --select best --target 0.9 --figures figures/best.pdf --out table.tex
  python -m fedbench.report sweeps --metric personal/auc --group algorithm,partition.alpha --out table.csv
  python -m fedbench.report sweeps --figures figures --against partition.alpha
  python -m fedbench.report sweeps --paper pgfed_table1_cifar --figures figures
  python -m fedbench.report sweeps/mu --choose algorithm.mu
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
    p.add_argument("--paper", metavar="TABLE", help="compare with this printed table, cell by cell")
    p.add_argument("--metric", help="a column of metrics.csv (default: the score that the runs went by)")
    p.add_argument(
        "--select",
        choices=scores.SELECTIONS,
        default="last",
        help="the round that orders the rows and gives worst tenth and global (default: %(default)s)",
    )
    p.add_argument("--target", type=float, default=0.7, help="value to reach (default: %(default)s)")
    p.add_argument("--group", help="config keys to group by, with commas (default: everything but the seed)")
    p.add_argument("--format", choices=FORMATS, help="default: text, or what the suffix of --out says")
    p.add_argument("--out", type=typed_path, help="file to write the tables to, instead of printing them")
    p.add_argument("--figures", type=typed_path, metavar="DIR[/NAME.pdf]",
                   help="folder to draw figures into (.png); with NAME.pdf or NAME.svg: as such files, "
                        "whose names begin with NAME")  # fmt: skip
    p.add_argument(
        "--against",
        metavar="KEY",
        help="draw the metric over this config key too "
        "(partition.shots), or over what was sent (bytes, bytes_up, bytes_down)",
    )
    p.add_argument("--choose", metavar="KEY", help="the value of this config key that each client's validation part "
                                                   "prefers (algorithm.mu), as a list to paste")  # fmt: skip
    return p


@lasting()
def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 after a mistake told in one sentence."""
    args = parser().parse_args(argv)
    try:
        text, drawn = report(args)
        write(text, args.out)
        for path in drawn:
            print(f"figure: {path}", file=sys.stderr)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {refused(error)}", file=sys.stderr)
        return 1
    return 0


def report(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """The text that the parsed flags ask for, and the figures drawn; ConfigError for a mistake in the flags."""
    check_flags(args)
    form = args.format or (SUFFIXES.get(args.out.suffix, "text") if args.out else "text")
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
    require(args.target == args.target, "--target must be a number, got nan")
    idle = [
        name
        for name in ("metric", "select", "group", "against")
        if args.paper and not args.choose and getattr(args, name) != parser().get_default(name)
    ]
    require(
        not idle,
        f"--paper {args.paper} prints a table of its own: leave out " + ", ".join(f"--{name}" for name in idle),
    )
    require(
        args.format is not None or args.out is None or args.out.suffix in ("", *SUFFIXES),  # none: a device
        f"--out {args.out}: a file's name ends in {', '.join(SUFFIXES)}, or --format says what it holds",
    )
    check_file("--out", args.out)
    if args.figures is not None:
        from fedbench.report.drawing import place_of  # NumPy apart, drawing loads nothing until it draws

        place_of("--figures", args.figures)


def default_folders() -> list[Path]:
    """Where runs are when nobody says: what there is of runs and sweeps."""
    return [folder for folder in (Path("runs"), Path("sweeps")) if folder.is_dir()]


def overview(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """The tables of all runs found, and the figures drawn."""
    runs, damaged = sound(find_runs(args.folders or default_folders() or ["runs"]))
    metric = args.metric or scores.primary_metric(runs)
    options = Options(metric, args.select, args.target, args.group.split(",") if args.group else None)
    scores.check_metric(options.metric, runs)
    fraction = scores.is_fraction(options.metric)
    require(
        not fraction or 0 <= options.target <= 1,
        f"--target is {options.target:g}; {options.metric} is at most 1 and at least 0",
    )
    groups, repeated = group_runs(runs, options.group)
    tables = [Table("no run has finished yet", [])]
    if groups:
        wide = results(groups, runs, options)
        sent = sent_table(groups, options)  # in the order of the results
        reading_notes = Table("", [], notes=notes(groups, repeated, options))
        tables = [wide] if form == "csv" else [*narrow(wide, options), *([sent] if sent else []), reading_notes]
    left = unfinished(runs)
    if left is not None and form != "csv":
        tables.append(left)
    say_damage(left_out(damaged, runs), tables, form)
    drawn: list[Path] = []
    if args.figures:
        from fedbench.report.drawing import place_of
        from fedbench.report.figures import by_setting, draw, file_name

        place = place_of("--figures", args.figures)
        drawn = draw(groups, runs, options, place)
        for setting, members in by_setting(groups).items():
            if any(is_compressed(run) for group in members for run in group.runs):
                drawn.append(draw_sizes(members, place.file(f"sizes_{file_name(setting)}"), setting))
    if args.against:
        from fedbench.report.drawing import place_of
        from fedbench.report.figures import draw_against, file_name

        require(args.figures is not None, f"--against {args.against} draws a figure: give --figures a folder for it")
        path = place_of("--figures", args.figures).file(f"against_{file_name(args.against, options.metric)}")
        draw_one = draw_over_bytes if args.against in DIRECTIONS else draw_against
        drawn.append(draw_one(groups, options, args.against, path))
    return tables, drawn


def chosen(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """The table of the values that clients choose."""
    from fedbench.report.choose import check_flags, choose

    check_flags(args, parser())
    runs, damaged = sound(find_runs(args.folders or default_folders() or ["runs"]))
    say_damage(left_out(damaged, []), [], "csv")
    return [choose(runs, args.choose, args.metric or scores.primary_metric(runs))], []


def beside_paper(args: argparse.Namespace, form: str) -> tuple[list[Table], list[Path]]:
    """A printed table beside our runs of it; where there are none, what there is to run."""
    from fedbench.config.conf_tree import find_conf_dir
    from fedbench.report import paper

    name = args.paper
    paper.read_table(name)  # a misspelt name is told before the runs are read
    require(0 <= args.target <= 1, f"--target is {args.target:g}; an accuracy is at most 1 and at least 0")
    folders = args.folders or default_folders()
    runs, damaged = sound(find_runs(folders)) if folders else ([], {})
    known = paper.experiments(find_conf_dir())
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


def say_damage(lines: list[str], tables: list[Table], form: str) -> None:
    """Below the tables, or, where those are for a program, on standard error."""
    if form == "csv":
        for line in lines:
            print(one_line(line), file=sys.stderr)
    elif lines:
        tables.append(Table("", [], notes=lines))


def write(text: str, path: Path | None) -> None:
    """Print, or write a file and say so."""
    if path is None:
        print(text, end="")
        return
    write_file("--out", path, lambda file: file.write(text.encode()))
    print(f"table: {path}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
