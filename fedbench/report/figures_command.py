"""``python -m fedbench figures``: figures of single runs as in papers, and figures that compare runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, require
from fedbench.report import figures, scores
from fedbench.report import method_figures as draw
from fedbench.report.drawing import FigureFiles, figure_files
from fedbench.report.runs import Run, find_runs, first_line, readable
from fedbench.report.scores import Options
from fedbench.report.summary import group_runs

DAMAGE = (ConfigError, ValueError, LookupError, TypeError, OSError)  # what reading a damaged file may raise
EXAMPLES = """examples:
  python -m fedbench figures runs/apple/mnist/2026-01-01_12-00-00 --rounds 0,10,160
  python -m fedbench figures sweeps --target 0.7 --out figures

For each run: metric and loss over rounds with each client's value at the best round (run), and the training images by
class and client (labels).  If the method recorded them: its relationships beside the labels and over rounds (d,
d_paths), the change in A with two regressions (A_change), whose slopes and Pearson's r are printed, the weights of its
experts (experts), and the distance of personal parts (sdwd).
For all finished runs of a setting: convergence with the target as a dotted line (curves), each client's gain over
Local (gains), new clients (new_clients), and, if the method recorded it, the loss from the first local step of each
round to the last one (inside_rounds)."""


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench figures``."""
    p = arguments("figures", "Draw figures of runs as in papers.", EXAMPLES)
    p.add_argument("folders", nargs="+", type=typed_path, help="run folders, or folders with runs below them")
    p.add_argument("--out", type=typed_path, metavar="DIR[/NAME.pdf]",
                   help="folder for figures (.png; default: figures in the first folder); with NAME.pdf or NAME.svg: "
                        "figures of that format, whose names begin with NAME")  # fmt: skip
    p.add_argument("--rounds", metavar="R,R,...",
                   help="the rounds for which relationships between clients are drawn; 0 is before the first round "
                        "(default: the first, the middle and the last recorded round)")  # fmt: skip
    p.add_argument("--metric", help="a column of metrics.csv (default: the primary metric of the runs)")
    p.add_argument("--target", type=float, default=0.7, help="value to reach (default: %(default)s)")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench figures`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_args(argv)
    rounds = parse_rounds(args.rounds)
    is_number = args.target == args.target  # only nan differs from itself
    require(is_number, "--target must be a number, got nan: give a value of the metric, such as 0.8")
    files = figure_files("--out", args.out) if args.out else FigureFiles(args.folders[0] / "figures")
    intact, damaged = readable(find_runs(args.folders, args.config_dir))
    for path, reason in damaged.items():
        print(f"damaged, left out: {path}: {reason}", file=sys.stderr)
    runs = [run for run in intact if len(run.metrics)]
    require(bool(runs), f"no run in {args.folders[0]} has been evaluated yet: wait for a run, or give another folder")
    metric = args.metric or scores.primary_metric(runs)
    scores.check_metric(metric, args.target, runs)
    if rounds is not None:
        check_rounds(args.rounds, max(rounds), runs)
    for run in runs:
        prefix = f"{folder_name(run, runs)}_" if len(runs) > 1 else ""  # file names of several runs must differ
        try:
            draw_run_figures(run, files, prefix, metric, rounds)
        except DAMAGE as error:  # what reading a damaged file may raise
            print(f"damaged, not all drawn: {run.path}: {run.clients_error or first_line(error)}", file=sys.stderr)
    draw_comparisons(runs, files, Options(metric=metric, target=args.target))
    return 0


def parse_rounds(text: str | None) -> list[int] | None:
    """Return the rounds of ``--rounds``; None without the flag.

    Raises:
        ConfigError: The text is not a list of integers.
    """
    if text is None:
        return None
    require(
        re.fullmatch(r"\d{1,18}(,\d{1,18})*", text) is not None,
        f"--rounds {text} must be integers >= 0 separated by commas, such as 0,10,160",
    )
    return [int(part) for part in text.split(",")]


def check_rounds(text: str, last_asked: int, runs: list[Run]) -> None:
    """Check that at least one run recorded relationships between clients as far as the last round of ``--rounds``.

    Args:
        text: The value of ``--rounds``, for error messages.
        last_asked: The last of these rounds.
        runs: The runs.

    Raises:
        ConfigError: No run recorded relationships, or all recordings end before the round.
    """
    recorded = []
    for run in runs:
        try:
            matrices = draw.matrices(run)
        except DAMAGE:  # reported when the figures of the run are drawn
            continue
        # relationships between clients: APPLE's coefficients "d", or pFedNet's deviation over clients "sdwd"
        if "d" in matrices or "sdwd" in matrices:
            recorded.append(int(matrices["rounds"][-1]))
    require(
        bool(recorded),
        f"--rounds {text} chooses the rounds of relationships between clients, but the methods of these runs recorded "
        "none: leave it out",
    )
    require(
        last_asked <= max(recorded),
        f"--rounds {text}: the last recorded round is {max(recorded)}; give rounds from 0 to {max(recorded)}",
    )


def folder_name(run: Run, runs: list[Run]) -> str:
    """Return the path of a run below the folder that contains all runs, with "_" between its parts.

    Args:
        run: One of the runs.
        runs: At least two runs.
    """
    paths = [other.path.resolve().parts for other in runs]
    first_different = next(i for i, parts in enumerate(zip(*paths)) if len(set(parts)) > 1)
    return re.sub(r"[^\w.-]+", "_", "_".join(run.path.resolve().parts[first_different:]))


def draw_run_figures(run: Run, files: FigureFiles, prefix: str, metric: str, rounds: list[int] | None) -> None:
    """Draw the figures of one run and print their paths.

    Args:
        run: The run.
        files: The folder, prefix and format of the figures.
        prefix: The beginning of this run's file names, after the prefix of ``files``.
        metric: The metric of the figure "run".
        rounds: The rounds of figures of relationships; None for the first, the middle and the last recorded round.
    """

    def path(name: str) -> Path:
        return files.path(f"{prefix}{name}")

    print_path(draw.draw_run(run, path("run"), metric))
    if draw.label_counts(run) is not None:
        print_path(draw.draw_labels(run, path("labels")))
    matrices = draw.matrices(run)
    if "d" in matrices:  # APPLE's coefficients of other clients
        print_path(draw.draw_relationships(run, path("d"), rounds))
        print_path(draw.draw_paths(run, path("d_paths")))
    if "sdwd" in matrices:  # pFedNet's deviations of personal parameters over clients
        print_path(draw.draw_sdwd(run, path("sdwd"), rounds))
    if "A" in matrices:  # PGFed's coefficients of other clients
        print_path(draw.draw_change(run, path("A_change")))
        columns, rows = draw.regressions(run)
        print(f"change in A, mean of column j against n_j: {columns}; mean of row i against n_i: {rows}")
    if len(draw.experts(run)):  # pFedMoAP's weights of experts
        print_path(draw.draw_experts(run, path("experts")))


def draw_comparisons(runs: list[Run], files: FigureFiles, options: Options) -> None:
    """Draw the figures that compare finished runs of one setting (data set, partition, model), and print their paths.

    Args:
        runs: The runs.
        files: The folder, prefix and format of the figures.
        options: The metric and the target.
    """
    groups, _ = group_runs(runs)  # and the number of repeated runs, not needed here
    for path in figures.draw_settings(groups, runs, options, files):
        print_path(path)
    for setting, members in figures.by_setting(groups).items():
        suffix = figures.file_name(setting)
        # with clients that joined after training, and with losses at the first and last local step of each round
        adapted = [group for group in members if all(len(draw.adaptation(run)) for run in group.runs)]
        if adapted:
            print_path(draw.draw_new_clients(adapted, files.path(f"new_clients_{suffix}"), setting))
        recorded = [group for group in members if all(len(draw.losses_inside_rounds(run)) for run in group.runs)]
        if recorded:
            print_path(draw.draw_inside_rounds(recorded, files.path(f"inside_rounds_{suffix}"), setting))


def print_path(path: Path) -> None:
    """Print "figure: PATH" on standard output."""
    print(f"figure: {path}")
