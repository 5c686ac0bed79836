"""``python -m fedbench contours``: true and predicted outlines of a segmentation, one row for each run.

Test pictures of every client in turn, the same for all runs (one data set, one partition): the outline of what is not
background is red where it is true and blue where the client's model sees it (pFedNet, Figure 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedbench.config.conf_tree import conf_dirs
from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.destination import check_file, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import require
from fedbench.report.drawing import SUFFIXES, literal, pyplot
from fedbench.report.words import printed

TRUE, PREDICTED = "#D62728", "#1F77B4"
EXAMPLES = """examples:
  python -m fedbench contours runs/tumours/2026-01-01_12-00-00
  python -m fedbench contours sweeps/fedavg sweeps/pfednet --out contours.png --pictures 10"""


@dataclass(frozen=True)
class Segmented:
    """A run's test pictures [n, H, W], masks and predictions [n, H, W] of classes; whose (client) and which (index)."""

    name: str
    client: np.ndarray
    index: np.ndarray
    picture: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray


def segmented(
    run_dir: Path, channel: int = 0, overrides: Sequence[str] = (), config_dir: str | None = None
) -> Segmented:
    """What every client's model, as it stood at the last checkpoint, makes of the client's test pictures."""
    import torch

    from fedbench.tools.export import open_run, predictions_of

    sim = open_run(run_dir, overrides, config_dir)
    federation, task = sim.engine.federation, sim.engine.task
    require(task.kind == "segmentation", f"{run_dir} is a run of task={task.kind}: contours are of segmentations")
    made = predictions_of(sim)
    pictures, _ = federation.gather(torch.from_numpy(made["index"]).to(federation.device))
    require(isinstance(pictures, torch.Tensor), f"{run_dir}: contours need one picture a sample, not several inputs")
    assert isinstance(pictures, torch.Tensor)  # [n, C, H, W]
    require(
        0 <= channel < pictures.shape[1], f"--channel is {channel}; pictures have channels 0 to {pictures.shape[1] - 1}"
    )
    name = printed(str(sim.cfg.choices.algorithm), tuple(conf_dirs(config_dir)))
    shown = pictures[:, channel].float().cpu().numpy()
    return Segmented(name, made["client"], made["index"], shown, made["target"], made["logits"].argmax(1))


def told_apart(runs: Sequence[Segmented], folders: Sequence[Path]) -> list[Segmented]:
    """The runs, with their folders behind the names that several of them have."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({folder.resolve().name})") if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders)
    ]


def chosen(run: Segmented, count: int) -> np.ndarray:
    """Positions of `count` pictures, clients in turn, each client's by the size of what they show: from the middle
    downwards."""
    area = (run.truth > 0).sum((1, 2))
    queues = []  # of each client
    for client in np.unique(run.client):
        mine = np.flatnonzero(run.client == client)
        mine = mine[np.argsort(-area[mine], kind="stable")]
        queues.append(np.roll(mine, -(len(mine) // 2)))
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return np.sort(np.array(turns[:count]))


def draw(runs: Sequence[Segmented], count: int, path: Path) -> None:
    """The figure: runs down, pictures across.  ConfigError where runs do not have the same pictures."""
    first = runs[0]
    for run in runs[1:]:
        require(
            np.array_equal(run.index, first.index) and np.array_equal(run.client, first.client),
            "runs are of other data or partitions: contours compare what was tested on the same pictures",
        )
    places, plt = chosen(first, count), pyplot()
    figure, grid = plt.subplots(
        len(runs),
        len(places),
        figsize=(1.5 * len(places) + 1, 1.55 * len(runs) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for row, run in zip(grid, runs):
        for axes, at in zip(row, places):
            axes.imshow(run.picture[at], cmap="gray", interpolation="nearest")
            for mask, colour in ((run.truth[at] > 0, TRUE), (run.predicted[at] > 0, PREDICTED)):
                if mask.any() and not mask.all():  # else there is no outline
                    axes.contour(mask, levels=[0.5], colors=[colour], linewidths=1.2)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(literal(run.name), fontsize=9)
    for axes, at in zip(grid[0], places):
        axes.set_title(f"client {first.client[at]}", fontsize=9)
    figure.supxlabel("red: true outline, blue: predicted", fontsize=9)
    write_file("--out", path, lambda file: figure.savefig(file, dpi=150, format=path.suffix.removeprefix(".")))
    plt.close(figure)


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments("contours", "Draw true and predicted outlines on test pictures, one row for each run.", EXAMPLES)
    p.add_argument("runs", nargs="+", type=typed_path, help="run folders")
    p.add_argument("--out", type=typed_path, default=Path("contours.png"), metavar="FILE", help="png, pdf or svg")
    p.add_argument("--pictures", type=int, default=5, metavar="N", help="how many (default: %(default)s)")
    p.add_argument("--channel", type=int, default=0, metavar="C", help="shown in grey (default: %(default)s)")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_args(argv)
    require(args.pictures >= 1, f"--pictures must be at least 1, got {args.pictures}")
    require(args.out.suffix in SUFFIXES, f"--out {args.out} must end in .png, .pdf or .svg")
    check_file("--out", args.out)
    runs = [segmented(run, args.channel, config_dir=args.config_dir) for run in args.runs]
    draw(told_apart(runs, args.runs), args.pictures, args.out)
    print(f"figure: {args.out}")
    return 0
