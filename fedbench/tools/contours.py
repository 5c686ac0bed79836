"""The command ``fedbench contours``: draw true and predicted outlines of segmentations, one row per run.

The pictures are test samples, taken from each client in turn, and the same for all runs.  Outlines of the classes
except the background are red for the target and blue for the prediction of the client's model (pFedNet, Figure 14).
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
from fedbench.report.display import method_name
from fedbench.report.drawing import SUFFIXES, escape_mathtext, pyplot

TRUE_COLOUR, PREDICTED_COLOUR = "#D62728", "#1F77B4"
EXAMPLES = """examples:
  python -m fedbench contours runs/tumours/2026-01-01_12-00-00
  python -m fedbench contours sweeps/fedavg sweeps/pfednet --out contours.png --pictures 10"""


@dataclass(frozen=True)
class Segmentations:
    """Images, true and predicted masks of the n test samples of a run.

    Attributes:
        name: The name of the run's method.
        client: The client of each sample [n].
        index: The index of each sample in the data set [n].
        image: One channel of the images [n, H, W].
        truth: The target class of each pixel [n, H, W]; 0 is the background.
        predicted: The predicted class of each pixel [n, H, W].
    """

    name: str
    client: np.ndarray
    index: np.ndarray
    image: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray


def segmentations_of(
    run_dir: Path, channel: int = 0, overrides: Sequence[str] = (), config_dir: str | None = None
) -> Segmentations:
    """Return images, targets and predictions of all clients' test samples, each by its client's last saved model.

    Args:
        run_dir: The run folder.
        channel: The channel of the images to draw.
        overrides: Classes of the user that the run needs, such as "model._target_=my_package.MyNet".
        config_dir: A folder with the user's own options, or None.

    Raises:
        ConfigError: The run is not a segmentation of images with this channel.
    """
    import torch

    from fedbench.tools.export import open_run, predictions_of

    sim = open_run(run_dir, overrides, config_dir)
    federation, task = sim.engine.federation, sim.engine.task
    require(
        task.kind == "segmentation",
        f"{run_dir} is a run of task={task.kind}: name folders of runs of task=segmentation",
    )
    outputs = predictions_of(sim)
    # gather: inputs and targets of samples, by their indices in the data set
    images, _ = federation.gather(torch.from_numpy(outputs["index"]).to(federation.device))
    require(
        isinstance(images, torch.Tensor),
        f"the model of {run_dir} has several inputs, of which none can be drawn: name folders of runs with one image "
        "per sample",
    )
    assert isinstance(images, torch.Tensor)  # [n, C, H, W]
    last_channel = images.shape[1] - 1
    require(
        0 <= channel <= last_channel, f"--channel {channel} does not exist: choose a channel from 0 to {last_channel}"
    )
    name = method_name(str(sim.cfg.choices.algorithm), tuple(conf_dirs(config_dir)))
    image = images[:, channel].float().cpu().numpy()
    predicted = outputs["logits"].argmax(1)  # logits [n, classes, H, W]
    return Segmentations(
        name, outputs["client"], outputs["index"], image=image, truth=outputs["target"], predicted=predicted
    )


def with_unique_names(runs: Sequence[Segmentations], folders: Sequence[Path]) -> list[Segmentations]:
    """Return the runs with the name of the folder added to names that several runs have.

    Args:
        runs: The segmentations of runs.
        folders: The folder of each run.
    """
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({folder.resolve().name})") if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders)
    ]


def select_samples(run: Segmentations, count: int) -> np.ndarray:
    """Return the positions of ``count`` samples, or of all if there are fewer, taken from each client in turn.

    The first sample of a client has the median area of classes other than the background.  Smaller ones follow, and
    then the largest ones, because pictures of medium size show the outlines best.

    Args:
        run: The segmentations of a run.
        count: The number of samples.

    Returns:
        The positions, ascending.
    """
    area = (run.truth > 0).sum((1, 2))  # [n], in pixels
    queues = []  # of each client: the positions of its samples in the order in which they are taken
    for client in np.unique(run.client):
        samples = np.flatnonzero(run.client == client)
        samples = samples[np.argsort(-area[samples], kind="stable")]
        queues.append(np.roll(samples, -(len(samples) // 2)))  # begins with the median, and ends with larger ones
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return np.sort(np.array(turns[:count]))


def draw(runs: Sequence[Segmentations], count: int, path: Path) -> None:
    """Draw a figure with one row per run and one column per sample, and write it to a file.

    Args:
        runs: The segmentations of runs, at least one.
        count: The number of samples.
        path: The file.

    Raises:
        ConfigError: The runs have different test samples.
    """
    first = runs[0]
    for run in runs[1:]:
        require(
            np.array_equal(run.index, first.index) and np.array_equal(run.client, first.client),
            "the runs have different test samples, so their outlines cannot be compared: name runs with the same data "
            "set, partition and partition.seed",
        )
    positions, plt = select_samples(first, count), pyplot()
    figure, grid = plt.subplots(
        len(runs),
        len(positions),
        figsize=(1.5 * len(positions) + 1, 1.55 * len(runs) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for line, run in zip(grid, runs):
        for axes, i in zip(line, positions):
            axes.imshow(run.image[i], cmap="gray", interpolation="nearest")
            for mask, colour in ((run.truth[i] > 0, TRUE_COLOUR), (run.predicted[i] > 0, PREDICTED_COLOUR)):
                if mask.any() and not mask.all():  # otherwise there is no outline
                    axes.contour(mask, levels=[0.5], colors=[colour], linewidths=1.2)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(escape_mathtext(run.name), fontsize=9)
    for axes, i in zip(grid[0], positions):
        axes.set_title(f"client {first.client[i]}", fontsize=9)
    figure.supxlabel("red: true outline, blue: predicted", fontsize=9)
    write_file("--out", path, lambda file: figure.savefig(file, dpi=150, format=path.suffix.removeprefix(".")))
    plt.close(figure)


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench contours``."""
    p = arguments("contours", "Draw true and predicted outlines of segmentations, one row per run.", EXAMPLES)
    p.add_argument("runs", nargs="+", type=typed_path, help="run folders")
    p.add_argument("--out", type=typed_path, default=Path("contours.png"), metavar="FILE", help="png, pdf or svg")
    p.add_argument("--pictures", type=int, default=5, metavar="N", help="number of samples (default: %(default)s)")
    p.add_argument("--channel", type=int, default=0, metavar="C", help="channel of the images (default: %(default)s)")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench contours`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_args(argv)
    require(
        args.pictures >= 1, f"--pictures must be at least 1, got {args.pictures}: give the number of samples to draw"
    )
    require(
        args.out.suffix in SUFFIXES, f"--out {args.out} is no figure: write a file name that ends in .png, .pdf or .svg"
    )
    check_file("--out", args.out)
    runs = [segmentations_of(run, args.channel, config_dir=args.config_dir) for run in args.runs]
    draw(with_unique_names(runs, args.runs), args.pictures, args.out)
    print(f"figure: {args.out}")
    return 0
