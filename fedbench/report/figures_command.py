"""``python -m fedbench figures``: the papers' figures of one run or of several."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, require
from fedbench.report import figures, scores
from fedbench.report import method_figures as draw
from fedbench.report.drawing import Place, place_of
from fedbench.report.runs import Run, find_runs, sound
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs

DAMAGE = (ConfigError, ValueError, LookupError, TypeError, OSError)  # what files with foreign content raise
EXAMPLES = """examples:
  python -m fedbench figures runs/apple/mnist/2026-01-01_12-00-00 --rounds 0,10,160
  python -m fedbench figures sweeps --target 0.7 --out figures

Of every run: the metric and the loss over rounds with each client's value at the best round (run); the
training images by class and client (labels); where the method recorded them, its relationships beside
the labels and over rounds (d, d_paths), the change in A with its two regressions (A_change), whose slopes and
Pearson's r are printed, the weights of its experts (experts), or how far personal parts are apart (sdwd).
Of all finished runs of a setting together: convergence with the target as a dotted line (curves), each
client's gain over Local (gains), new clients' bars and curves (new_clients), and where the method recorded it,
the loss from each round's first local step to its last (inside_rounds)."""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments("figures", "Draw what the papers draw of a method.", EXAMPLES)
    p.add_argument("folders", nargs="+", type=typed_path, help="run directories, or folders with runs below them")
    p.add_argument("--out", type=typed_path, metavar="DIR[/NAME.pdf]",
                   help="folder to draw into (default: figures in the first folder), as .png; with NAME.pdf or "
                        "NAME.svg: as such files, whose names begin with NAME")  # fmt: skip
    p.add_argument("--rounds", metavar="R,R,...", help="of the relationships; 0 is before the first")
    p.add_argument("--metric", help="a column of metrics.csv (default: the score that the runs went by)")
    p.add_argument("--target", type=float, default=0.7, help="value to reach (default: %(default)s)")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args(argv)
    rounds_asked = numbers(args.rounds)
    require(args.target == args.target, "--target must be a number, got nan")
    place = place_of("--out", args.out) if args.out else None
    readable, damaged = sound(find_runs(args.folders, args.config_dir))
    for path, why in damaged.items():
        print(f"damaged, left out: {path}: {why}", file=sys.stderr)
    runs = [run for run in readable if len(run.metrics)]
    if not runs:
        raise ConfigError(f"no run in {args.folders[0]} has been evaluated yet")
    args.metric = args.metric or scores.primary_metric(runs)
    scores.check_metric(args.metric, args.target, runs)
    check_rounds(args.rounds, rounds_asked, runs)
    place = place or Place(args.folders[0] / "figures")
    for run in runs:
        try:
            of_run(run, place, f"{label(run, runs)}_" if len(runs) > 1 else "", args.metric, rounds_asked)
        except DAMAGE as error:
            why = run.left_out or (str(error) or type(error).__name__).splitlines()[0]
            print(f"damaged, not all drawn: {run.path}: {why}", file=sys.stderr)
    together(runs, place, Options(metric=args.metric, target=args.target))
    return 0


def numbers(text: str | None) -> list[int] | None:
    """0,10,160 as numbers."""
    if text is None:
        return None
    require(
        re.fullmatch(r"\d{1,18}(,\d{1,18})*", text) is not None,
        f"--rounds {text}: whole numbers >= 0 with commas between them, such as 0,10,160",
    )
    return [int(part) for part in text.split(",")]


def check_rounds(text: str | None, asked: list[int] | None, runs: list[Run]) -> None:
    """Refuse rounds of relationships that no run has recorded."""
    if asked is None:
        return
    ends = [int(stored["rounds"][-1]) for stored in map(_matrices, runs) if {"d", "sdwd"} & stored.keys()]
    require(bool(ends), f"--rounds {text} are rounds of relationships, and no run here has recorded any: leave it out")
    last = max(ends)
    require(max(asked) <= last, f"--rounds {text}: the last round that was recorded is {last}")


def _matrices(run: Run) -> Mapping[str, Any]:
    try:
        return draw.matrices(run)
    except DAMAGE:  # reported when its figures are drawn
        return {}


def label(run: Run, runs: list[Run]) -> str:
    """A file name for a run among others: what its folder is called below what all have in common."""
    parts = [r.path.resolve().parts for r in runs]
    shared = next(i for i in range(len(parts[0])) if len({p[: i + 1] for p in parts}) > 1)
    return re.sub(r"[^\w.-]+", "_", "_".join(run.path.resolve().parts[shared:]))


def of_run(run: Run, place: Place, prefix: str, metric: str, wanted: list[int] | None) -> None:
    """The figures of one run."""
    print_path(draw.draw_run(run, place.file(f"{prefix}run"), metric))
    if draw.labels_of(run)[0] is not None:
        print_path(draw.draw_labels(run, place.file(f"{prefix}labels")))
    stored = draw.matrices(run)
    if "d" in stored:
        print_path(draw.draw_relationships(run, place.file(f"{prefix}d"), wanted))
        print_path(draw.draw_paths(run, place.file(f"{prefix}d_paths")))
    if "sdwd" in stored:
        print_path(draw.draw_sdwd(run, place.file(f"{prefix}sdwd"), wanted))
    if "A" in stored:
        print_path(draw.draw_change(run, place.file(f"{prefix}A_change")))
        columns, rows = draw.regressions(run)
        print(f"change in A, mean of column j against n_j: {columns}; mean of row i against n_i: {rows}")
    if len(draw.experts(run)):
        print_path(draw.draw_experts(run, place.file(f"{prefix}experts")))


def together(runs: list[Run], place: Place, options: Options) -> None:
    """The figures that compare runs, each of them the seeds of one setting."""
    groups, _ = group_runs(runs)
    for path in figures.draw(groups, runs, options, place):
        print_path(path)
    for setting, members in figures.by_setting(groups).items():
        adapted = [g for g in members if all(len(draw.adaptation(run)) for run in g.runs)]
        if adapted:
            path = place.file(f"new_clients_{figures.file_name(setting)}")
            print_path(draw.draw_new_clients(adapted, path, setting))
        within = [g for g in members if all(len(draw.inside_rounds(run)[0]) for run in g.runs)]
        if within:
            path = place.file(f"inside_rounds_{figures.file_name(setting)}")
            print_path(draw.draw_inside_rounds(within, path, setting))


def print_path(path: Path) -> None:
    """Tell the user where a figure is."""
    print(f"figure: {path}")
