"""The command ``fedbench partition``: show the samples and classes of each client without training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.core.command import Arguments, add_config_dir, add_json, arguments, command
from fedbench.core.destination import check_file
from fedbench.core.files import typed_path
from fedbench.core.json_output import print_json
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Split
from fedbench.partition._extra import count_extra
from fedbench.report.drawing import SUFFIXES

if TYPE_CHECKING:
    from fedbench.data.base import Arrays

MAX_ROWS = 40  # clients in the table
EXAMPLES = """examples:
  python -m fedbench partition partition.alpha=0.5 partition.num_clients=10
  python -m fedbench partition dataset=mnist partition=practical --figure practical.png
  python -m fedbench partition partition.num_clients=1000 --out partition.npz
"""


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench partition``."""
    p = arguments("partition", "Show the partition that a run with these overrides would use, and its hash.", EXAMPLES)
    p.add_argument("overrides", nargs="*", help="as for python -m fedbench: dataset=..., partition=..., keys")
    p.add_argument("--figure", type=typed_path, metavar="FILE", help="draw clients x classes (.png, .pdf, .svg)")
    p.add_argument("--out", type=typed_path, metavar="FILE", help="save the partition (.npz)")
    add_json(p)
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench partition`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_intermixed_args(argv)
    logging.basicConfig(format="%(message)s")  # show what the reading of data logs, such as downloads
    logging.getLogger("fedbench").setLevel(logging.INFO)
    check_file("--out", args.out)
    check_file("--figure", args.figure)
    require(
        args.figure is None or args.figure.suffix in SUFFIXES,
        f"--figure {args.figure} must end in one of {', '.join(SUFFIXES)}: add the suffix of the format that you want",
    )
    require(
        args.out is None or args.out != args.figure, f"--out and --figure are both {args.out}: name two different files"
    )
    arrays, split, title = build(args.overrides, args.config_dir)
    if args.json:
        print_json("partition", {"title": title, **as_object(arrays, split)})
    else:
        show(arrays, split, title)
    if args.out is not None:
        _write(args.out, split.save)
    if args.figure is not None:
        _write(args.figure, lambda path: draw(arrays, split, title, path))
    return 0


def build(overrides: list[str], config_dir: str | None = None) -> tuple[Arrays, Split, str]:
    """Return the data and the partition of a run with these overrides, and a title such as "mnist / dirichlet, ...".

    Args:
        overrides: Overrides of options, such as "dataset=digits".
        config_dir: A folder with the user's own options.
    """
    from fedbench.app.compose import compose
    from fedbench.config.check import check
    from fedbench.simulation import build as parts  # imports torch, which --help does not need

    cfg = compose(overrides, config_dir)
    check(cfg)
    arrays = parts.data(cfg)
    title = f"{cfg.choices.dataset} / {cfg.choices.partition}, partition.seed={cfg.partition.seed}"
    return arrays, parts.partition(cfg, arrays), title


def counts(arrays: Arrays, split: Split) -> tuple[np.ndarray, list[str]]:
    """Count the samples of each class for each client, over training, validation and test samples.

    Args:
        arrays: The data set.  Classes are the labels by which it is partitioned (Arrays.labels).
        split: The partition.

    Returns:
        The counts [N, C] and the names of the classes [C].  If samples have labels beyond the classes of the data set,
        these are further columns with the name "none".
    """
    labels, num_clients = arrays.labels(), split.num_clients
    width = max(arrays.num_classes, int(labels.max()) + 1)
    parts = (split.train, split.val, split.test)
    # client * width + label: a number for each pair, by which bincount counts the samples
    cells = np.concatenate([part.owners() * width + labels[part.indices] for part in parts])
    table = np.bincount(cells, minlength=num_clients * width).reshape(num_clients, width)
    names = list(arrays.class_names or map(str, range(arrays.num_classes)))
    return table, names + ["none"] * (width - len(names))


def as_object(arrays: Arrays, split: Split) -> dict[str, Any]:
    """Return the hash of a partition, and the samples of each client, as the JSON object of ``--json`` has them.

    Args:
        arrays: The data set.
        split: The partition.
    """
    table, names = counts(arrays, split)  # samples by client and class [N, C], and the names of the classes
    extra = count_extra(split, arrays)  # training samples that were added to the data set, such as synthesized ones
    train = split.train.sizes - extra
    clients = [
        {
            "client": i,
            "name": str(i) if split.names is None else split.names[i],
            **{"train": train[i], "extra": extra[i], "val": split.val.sizes[i], "test": split.test.sizes[i]},
            "label_counts": table[i],
        }
        for i in range(split.num_clients)
    ]
    left_out = len(arrays) - int(table.sum())  # samples of the data set that no client has
    return {"hash": split.hash, "samples": table.sum(), "left_out": left_out, "class_names": names, "clients": clients}


def show(arrays: Arrays, split: Split, title: str) -> None:
    """Print a table with a row per client, and below it the numbers of samples and the hash of the partition.

    The table has at most `MAX_ROWS` rows.  If there are too many classes for the terminal, the table has the number of
    classes of each client and the fraction of its largest class, instead of a column per class.

    Args:
        arrays: The data set.
        split: The partition.
        title: The title of the table.
    """
    from rich.console import Console
    from rich.table import Table

    table, names = counts(arrays, split)  # samples [N, C], and names of the classes
    extra = count_extra(split, arrays)  # training samples that were added to the data set, such as synthesized ones
    parts = {"train": split.train.sizes - extra, "extra": extra, "val": split.val.sizes, "test": split.test.sizes}
    parts = {name: sizes for name, sizes in parts.items() if sizes.any()}
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # files and pipes have no width
    digits = len(str(table.max(initial=0)))
    # 40: the width of the columns before those of the classes; 2: the space between columns
    is_too_wide = sum(max(len(name), digits) + 2 for name in names) > console.width - 40
    headers = ["classes", "largest class"] if is_too_wide else names
    view = Table("client", *parts, *headers, title=title, box=None, header_style="bold")
    for column in view.columns:
        column.justify = "right"
    for i in range(min(split.num_clients, MAX_ROWS)):
        cells = list(table[i])
        if is_too_wide:
            cells = [(table[i] > 0).sum(), f"{table[i].max() / max(table[i].sum(), 1):.0%}"]
        name = str(i) if split.names is None else split.names[i]
        numbers = [str(sizes[i]) for sizes in parts.values()]
        view.add_row(name, *numbers, *(str(value) if value else "·" for value in cells))
    if split.num_clients > MAX_ROWS:
        view.add_row("...")
    console.print(view)
    console.print(_summary(arrays, split, table, parts), highlight=False)


def _summary(arrays: Arrays, split: Split, table: np.ndarray, parts: dict[str, np.ndarray]) -> str:
    """Return the lines below the table: numbers of clients, samples and classes, and the hash of the partition.

    Args:
        arrays: The data set.
        split: The partition.
        table: The samples of each client and class [N, C].
        parts: The samples of each client [N], by the name of the part, such as "train".
    """
    total = table.sum(1)  # [N]
    classes = (table > 0).sum(1)  # [N]
    unused = len(arrays) - int(total.sum())
    omitted = f" ({unused:,} of the data set left out)" if unused else ""
    lines = [
        f"{split.num_clients:,} clients, {int(total.sum()):,} samples{omitted}",
        f"samples per client: {total.min():,} to {total.max():,}, median {np.median(total):,.0f}; "
        f"classes per client: {classes.min()} to {classes.max()}",
        ", ".join(f"{name} {int(sizes.sum()):,}" for name, sizes in parts.items()),
        f"hash {split.hash}",
    ]
    return "\n".join(lines)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, and print its path.

    Args:
        path: The file.
        write: A function that writes it, given the path.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        write(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} could not be written ({error}): name another file by --out or --figure") from error
    print(f"written: {path}", file=sys.stderr)


def draw(arrays: Arrays, split: Split, title: str, path: Path) -> None:
    """Draw the samples of each client (x) and class (y), and write the figure to a file.

    They are bubbles whose areas are the numbers of samples; or a heat map if there are more than 60 clients or classes.

    Args:
        arrays: The data set.
        split: The partition.
        title: The title of the figure.
        path: The file; its suffix is the format.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError(
            "--figure needs the package matplotlib, which is missing: run pip install matplotlib, or omit --figure"
        ) from error

    table, names = counts(arrays, split)
    clients, classes = table.shape
    figure = Figure(figsize=(min(3 + 0.3 * clients, 14), min(2 + 0.3 * classes, 10)), layout="constrained")
    axes = figure.add_subplot()
    if max(clients, classes) <= 60:
        client, label = np.nonzero(table)
        area = 220 * table[client, label] / table.max()  # in points^2, at most 220: bubbles do not overlap
        axes.scatter(client, label, s=area, color="tab:blue", linewidths=0)
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
        axes.set_axisbelow(True)
        axes.grid(color="0.92")
    else:
        image = axes.imshow(table.T, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        figure.colorbar(image, label="Samples")
    if classes <= 30:  # more names would overlap
        axes.set_yticks(range(classes), names)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="Client", ylabel="Class", title=title)
    figure.savefig(path, dpi=150)
