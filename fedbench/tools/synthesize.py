"""The command ``fedbench synthesize``: sample training images from diffusion models.

By default each client trains a model on its own training images.  With --run it samples from the model that it deploys
after a run of task=denoising.  Images are written to <out>/<site>/<class>/, which `dataset.extra` reads, measures to
<out>.csv, and a figure with samples to <out>.png.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.destination import check_file, check_folder, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, require

if TYPE_CHECKING:
    from fedbench.core.split import Split
    from fedbench.data.base import Arrays
    from fedbench.synthesis.diffusion import Predictor
    from fedbench.tasks.denoising import Schedule

IMAGES_PER_CLASS = 8  # in the figure
MAX_LINES = 60  # in the figure
BATCH = 128
MAX_SHARE = 1000
NOT_A_FOLDER = re.compile(r"|\.{1,2}|.*[/\\\0].*", re.DOTALL)
TRAINING = {
    "steps": "steps of a client's training",
    "batch": "images per step",
    "lr": "initial learning rate of Adam",
    "width": "channels of the first level",
    "decay": "decay of the moving average of the weights",
}
EXAMPLES = """examples:
  python -m fedbench synthesize dataset=image_folder dataset.path=real dataset.color=grey dataset.resize=28 \\
      partition=domain --out synthesized
  python -m fedbench algorithm=fedavg task=denoising model=noise_predictor dataset=image_folder dataset.path=real \\
      dataset.color=grey dataset.resize=28 partition=domain optimizer=adam hydra.run.dir=runs/generator
  python -m fedbench synthesize --run runs/generator --out synthesized
  python -m fedbench dataset=image_folder dataset.path=real dataset.color=grey dataset.resize=28 partition=domain \\
      dataset.extra=synthesized"""


@dataclass(frozen=True)
class Training:
    """Options of the training of a client's model; TRAINING describes them."""

    steps: int = 1500
    batch: int = 32
    lr: float = 0.002
    width: int = 16
    decay: float = 0.99

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            require(
                getattr(self, name) >= 1,
                f"--{name} must be at least 1, got {getattr(self, name)}: omit it for {getattr(Training, name)}",
            )
        require(
            self.width >= 8 and self.width % 8 == 0,
            f"--width must be a multiple of 8, got {self.width}: set 8, 16 or another multiple",
        )
        require(0 < self.lr < math.inf, f"--lr must be above 0 and finite, got {self.lr}: omit it for {Training.lr}")
        require(0 <= self.decay < 1, f"--decay must be in [0, 1), got {self.decay}: set 0 for no moving average")


@dataclass(frozen=True)
class Sampling:
    """Options of sampling images from a diffusion model: steps, images per real image, and seed.

    Attributes:
        ddim: The number of steps of the sampler DDIM (Song et al., ICLR 2021).
        share: Synthesized images per real training image of the same class.
        seed: The seed.
    """

    ddim: int
    share: float
    seed: int

    def __post_init__(self) -> None:
        require(self.ddim >= 1, f"--ddim must be at least 1, got {self.ddim}: omit it for 25 steps")
        require(
            0 < self.share <= MAX_SHARE,
            f"--share must be above 0 and at most {MAX_SHARE}, got {self.share}: omit it for one per real image",
        )


@dataclass(frozen=True)
class Generator:
    """A diffusion model: a function that predicts velocities, and its noise schedule.

    Attributes:
        predict: The function that predicts velocities, see `fedbench.synthesis.diffusion.Predictor`.
        schedule: The noise schedule.
        columns: Further columns of the client's row in the table, such as its training loss.
    """

    predict: Predictor
    schedule: Schedule
    columns: dict[str, float]


def train_generator(
    images: np.ndarray, labels: np.ndarray, num_classes: int, training: Training, seed: int, client: int
) -> Generator:
    """Train a diffusion model on the images of one client, and return it.

    The generator's column for the table of results, "loss", is the mean loss of the last tenth of the steps.

    Args:
        images: The training images, uint8 [n, C, H, W].
        labels: Their classes [n].
        num_classes: The number of classes.
        training: The options of training.
        seed: The seed.
        client: The index of the client, for the random numbers.

    Raises:
        ConfigError: The training diverged.
    """
    import torch

    from fedbench.core.rng import torch_generator
    from fedbench.synthesis.diffusion import train
    from fedbench.tasks.denoising import Schedule

    schedule, x = Schedule.cosine(), torch.from_numpy(images).float() / 127.5 - 1  # pixels in [-1, 1]
    generator = torch_generator(seed, "synthesize", client)
    y = torch.from_numpy(labels)
    model, losses = train(x, y, num_classes, schedule, generator=generator, **vars(training))
    loss = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    require(
        math.isfinite(loss),
        f"the training of client {client} diverged with --lr {training.lr}: set a smaller --lr, for example a tenth",
    )
    return Generator(model, schedule, columns={"loss": loss})


def sample_images(
    model: Generator, labels: np.ndarray, num_classes: int, shape: tuple[int, ...], sampling: Sampling, client: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample images of each class of a client.

    Args:
        model: The diffusion model.
        labels: The classes of the client's training images [n].
        num_classes: The number of classes.
        shape: The shape of an image [C, H, W].
        sampling: The options of sampling.
        client: The index of the client, for the random numbers.

    Returns:
        Images, uint8 [m, C, H, W], and their classes [m]: round(share * count) of each class, at least one.

    Raises:
        ConfigError: A sampled image is not finite.
    """
    import torch
    import torch.nn.functional as F

    from fedbench.core.rng import torch_generator
    from fedbench.synthesis.diffusion import ddim

    generator = torch_generator(sampling.seed, "samples", client)
    counts = np.bincount(labels, minlength=num_classes)
    sizes = np.where(counts > 0, np.maximum(1, np.rint(counts * sampling.share)), 0).astype(np.int64)
    classes, batches = torch.from_numpy(np.repeat(np.arange(num_classes), sizes)), []
    with torch.no_grad():
        for batch in classes.split(BATCH):
            noise, label = torch.randn(len(batch), *shape, generator=generator), F.one_hot(batch, num_classes).float()
            batches.append(ddim(model.predict, model.schedule, noise, label, sampling.ddim))  # the number of steps
    x = torch.cat(batches)
    require(
        bool(x.isfinite().all()),
        f"the model of client {client} samples values that are not finite: set more --steps or a smaller --lr",
    )
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy(), classes.numpy()  # from [-1, 1] to bytes


def write_images(folder: Path, site: str, names: list[str], images: np.ndarray, labels: np.ndarray) -> None:
    """Write images to <folder>/<site>/<class>/<index>.png.

    Args:
        folder: The folder.
        site: The name of the site.
        names: The names of the classes.
        images: Images, uint8 [n, C, H, W], with one channel or three.
        labels: Their classes [n].
    """
    from PIL import Image

    for i, (image, label) in enumerate(zip(images, labels)):
        is_grey = image.shape[0] == 1
        picture = Image.fromarray(image[0] if is_grey else np.ascontiguousarray(image.transpose(1, 2, 0)))
        path = folder / site / names[label] / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file("--out", path, lambda file, picture=picture: picture.save(file, format="PNG"))


def measures_of(
    real: np.ndarray,
    real_labels: np.ndarray,
    test: np.ndarray,
    synthetic: np.ndarray,
    labels: np.ndarray,
    network: Any,
    seed: int,
) -> dict[str, float]:
    """Return the measures of a client's synthesized images.

    Args:
        real: The client's training images, uint8 [n, C, H, W].
        real_labels: Their classes [n].
        test: The client's test images [t, C, H, W].
        synthetic: The synthesized images [m, C, H, W].
        labels: Their classes [m].
        network: The network that computes features for Frechet distances.
        seed: The seed.

    Returns:
        The measures of `fedbench.synthesis.measures`: Frechet distances of real images, synthesized images and noise to
        one half of the real images (`bounds`), distances to the nearest training
        and test images (`neighbours`), and the diversity of synthesized and of real images.
    """
    from fedbench.core.rng import generator
    from fedbench.synthesis.measures import bounds, diversity, neighbours
    from fedbench.tools.fid import features_of, frechet

    def features(images: np.ndarray) -> np.ndarray:
        return features_of(network, images, "cpu")

    return {
        **bounds(real, synthetic, features, frechet, generator(seed, "bounds")),
        **neighbours(synthetic, real, test),
        "diversity": diversity(synthetic, labels),
        "diversity_real": diversity(real, real_labels),
    }


def images_of(arrays: Arrays) -> tuple[np.ndarray, list[str], list[str]]:
    """Return the images, uint8 [n, C, H, W], the names of sites and the names of classes.

    Raises:
        ConfigError: The data set does not consist of uint8 images with one class and a site each, or a name cannot be
            that of a folder.
    """
    from fedbench.data.base import EXTRA

    images = arrays.images
    if images is None or images.dtype != np.uint8 or arrays.task != "classification":
        raise ConfigError(
            "the data set does not consist of uint8 images with one class each: choose another data set, such as "
            "dataset=image_folder"
        )
    if arrays.domain_names is None or arrays.class_names is None:
        raise ConfigError(
            "the data set has no names of sites and classes, which become folders of --out: choose a data set with "
            "names, such as dataset=image_folder"
        )
    require(
        not (arrays.split == EXTRA).any(),
        "dataset.extra is set, but models are trained on real images only: omit dataset.extra",
    )
    for name in [*arrays.domain_names, *arrays.class_names]:
        is_folder = NOT_A_FOLDER.fullmatch(name) is None
        require(
            is_folder,
            f"the site or class {name!r} cannot be the name of a folder in --out: rename it in the data set",
        )
    return images, arrays.domain_names, arrays.class_names


def sites_of(arrays: Arrays, split: Split, num_clients: int) -> list[str]:
    """Return the name of each client's site.

    Args:
        arrays: The data set.
        split: The partition.
        num_clients: The number of clients, without new clients.

    Raises:
        ConfigError: A client has images of several sites, or two clients share a site.
    """
    client_of_site: dict[str, int] = {}
    for client in range(num_clients):
        domains = np.unique(arrays.domain[split.train[client]])  # type: ignore[index]
        sites = [arrays.domain_names[domain] for domain in domains.tolist()]  # type: ignore[index]
        require(
            len(sites) == 1,
            f"client {client} has images of {len(sites)} sites, but images are written by site, one client per site: "
            "choose partition=domain",
        )
        other = client_of_site.setdefault(sites[0], client)
        require(
            other == client,
            f"clients {other} and {client} share site {sites[0]}, but images are written by site, one client per site: "
            "choose partition=domain",
        )
    return list(client_of_site)


@dataclass(frozen=True)
class Source:
    """The real images of clients, and a function that returns the diffusion model of a client.

    Attributes:
        data_dir: The folder of data.
        arrays: The data set.
        split: The partition.
        num_clients: The number of clients, without those that join after training.
        model_of: The function that returns the diffusion model of a client, given by its index.
        is_shared: Whether a model may depend on other clients' training images, so that synthesized images are compared
            with them, too.
    """

    data_dir: str
    arrays: Arrays
    split: Split
    num_clients: int
    model_of: Callable[[int], Generator]
    is_shared: bool


def own_models(overrides: list[str], training: Training, seed: int, config_dir: str | None = None) -> Source:
    """Return a source in which each client trains a model on its own training images, when its model is asked for.

    Args:
        overrides: Overrides of options for the data and the partition, such as "dataset=digits".
        training: The options of training.
        seed: The seed of training.
        config_dir: A folder with the user's own options.
    """
    from fedbench.app.compose import compose
    from fedbench.config.check import check
    from fedbench.simulation import build

    cfg = compose(overrides, config_dir)
    check(cfg)
    arrays = build.data(cfg)
    images, _, _ = images_of(arrays)  # uint8 [n, C, H, W], and the names of sites and classes
    split: Split = build.partition(cfg, arrays)

    def model_of(client: int) -> Generator:
        samples = split.train[client]
        return train_generator(images[samples], arrays.targets[samples], arrays.num_classes, training, seed, client)

    # is_shared=False: the model of a client depends on no other client's images
    return Source(cfg.data_dir, arrays, split, split.num_clients, model_of, is_shared=False)


def models_of_run(path: Path, overrides: list[str], config_dir: str | None = None) -> Source:
    """Return a source with the models that clients deploy after a run.

    Args:
        path: The run folder.
        overrides: Classes of the user that the run needs, such as "model._target_=my_package.MyNet".
        config_dir: A folder with the user's own options, or None.

    Raises:
        ConfigError: The run does not train one diffusion model per client.
    """
    from fedbench.algorithms.base import Algorithm
    from fedbench.simulation import build
    from fedbench.tasks.denoising import Denoising
    from fedbench.tools.export import client_module, open_run

    sim = open_run(path, overrides, config_dir)
    task, arrays = sim.engine.task, build.data(sim.cfg)
    if not isinstance(task, Denoising):
        raise ConfigError(f"--run {path} is a run of task={task.kind}: choose a run of task=denoising")
    method = type(sim.algorithm)
    require(
        method.predict is Algorithm.predict,
        f"--run {path} is a run of {method.__name__}, which predicts with more than one model per client: choose a run "
        "of another method, such as algorithm=fedavg",
    )
    schedule = task.schedule.to("cpu")
    return Source(
        sim.cfg.data_dir,
        arrays,
        build.partition(sim.cfg, arrays),
        sim.engine.federation.num_clients,
        lambda client: Generator(client_module(sim, client), schedule, columns={}),  # no columns for the table
        is_shared=True,  # a model may depend on other clients' images
    )


def synthesize(
    source: Source,
    sampling: Sampling,
    out: Path,
    choice: str,
    weights: str | None,
    only: list[int] | None = None,
    config_dir: str | None = None,
) -> None:
    """Sample, write and measure the images of each client.

    Args:
        source: The images and the models.
        sampling: The options of sampling.
        out: The folder of the images.
        choice: The network of Frechet distances: "inception", "random" or a run folder.
        weights: The file with the weights of inception; None for the default file.
        only: The indices of the clients; None for all.
        config_dir: A folder with the user's own options.

    Raises:
        ConfigError: There is no such client, or the images cannot be written by site and class.
    """
    from fedbench.synthesis.measures import neighbours
    from fedbench.tools.fid import make_network

    arrays, split, n = source.arrays, source.split, source.num_clients
    images, _, names = images_of(arrays)
    sites = sites_of(arrays, split, n)
    clients = list(range(n)) if only is None else only
    for client in clients:
        require(0 <= client < n, f"--client {client} does not exist: choose a client from 0 to {n - 1}")
        require(clients.count(client) == 1, f"--client {client} is given twice: name each client once")
    network = make_network(choice, weights, source.data_dir, "cpu", config_dir)
    rows, lines = [], []
    try:
        for client in clients:
            train, test, site = split.train[client], split.test[client], sites[client]
            real, real_labels, model = images[train], arrays.targets[train], source.model_of(client)
            synthetic, labels = sample_images(
                model, real_labels, arrays.num_classes, images.shape[1:], sampling, client
            )
            write_images(out, site, names, synthetic, labels)
            row = {"client": client, "silo": site, "real": len(real), "synthesized": len(synthetic), **model.columns}
            row |= measures_of(real, real_labels, images[test], synthetic, labels, network, sampling.seed)
            if source.is_shared and n > 1:
                others = np.concatenate([split.train[other] for other in range(n) if other != client])
                of_others = neighbours(synthetic, images[others], images[test])
                row |= {f"{name}_others": value for name, value in of_others.items()}
            rows.append(row)
            print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
            write_table(rows, network.name, out)  # after each client, so that an interruption loses nothing
            for label in np.unique(labels):
                shown = (real[real_labels == label], synthetic[labels == label])
                lines.append((f"{site}, {names[label]}", *(group[:IMAGES_PER_CLASS] for group in shown)))
    finally:
        if lines:
            write_figure(lines[:MAX_LINES], out)


def write_table(rows: list[dict[str, Any]], network: str, out: Path) -> None:
    """Write a table with measures of each client's synthesized images, such as Frechet distances, to <out>.csv.

    Args:
        rows: A dict of columns per client, with the same keys.
        network: The description of the network of the Frechet distances, which becomes the last column.
        out: The folder of the images.
    """
    import csv
    import io

    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0], "network"], lineterminator="\n")
    table.writeheader()
    table.writerows([{**row, "network": network} for row in rows])
    write_file("--out", out.with_name(out.name + ".csv"), lambda file: file.write(text.getvalue().encode()))


def write_figure(lines: list[tuple[str, np.ndarray, np.ndarray]], out: Path) -> None:
    """Write <out>.png, with one line of real and synthesized images per site and class.

    Args:
        lines: The label of each line, its real images and its synthesized images, each uint8 [k, C, H, W] with k at
            most `IMAGES_PER_CLASS`.
        out: The folder of the images.
    """
    from fedbench.report.drawing import pyplot

    plt, half = pyplot(), IMAGES_PER_CLASS
    figure, grid = plt.subplots(
        len(lines), 2 * half, figsize=(1.2 * half + 2, 0.65 * len(lines) + 0.6), squeeze=False, layout="constrained"
    )
    for axes_of_line, (label, real, synthetic) in zip(grid, lines):
        for axes in axes_of_line:
            axes.set(xticks=[], yticks=[])
        for axes_of_half, images in ((axes_of_line[:half], real), (axes_of_line[half:], synthetic)):
            for axes, image in zip(axes_of_half, images):
                axes.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), "gray", vmin=0, vmax=255)
        axes_of_line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7, parse_math=False)
    grid[0][0].set_title("real training images", fontsize=8, loc="left")
    grid[0][half].set_title("synthesized", fontsize=8, loc="left")
    path = out.with_name(out.name + ".png")
    write_file("--out", path, lambda file: figure.savefig(file, dpi=110, format="png"))
    plt.close(figure)


def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench synthesize``."""
    p = arguments(
        "synthesize",
        "Sample training images from diffusion models of the clients' training images, or from the models of a run.",
        EXAMPLES,
    )
    p.add_argument("overrides", nargs="*", help="as for python -m fedbench: dataset=... partition=domain ...")
    p.add_argument("--out", type=typed_path, default=Path("synthesized"), metavar="FOLDER", help="default: %(default)s")
    p.add_argument("--run", type=typed_path, metavar="FOLDER",
                   help="sample from the models of this run of task=denoising, instead of training some")  # fmt: skip
    p.add_argument("--client", type=int, action="append", metavar="N", help="only this client; may be repeated")
    for name, what in TRAINING.items():
        default = getattr(Training, name)
        p.add_argument(f"--{name}", type=type(default), help=f"{what} (default: {default})")
    p.add_argument("--ddim", type=int, default=25, help="DDIM steps of sampling (default: %(default)s)")
    p.add_argument("--share", type=float, default=1.0, help="number of images per real one (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of training and sampling (default: %(default)s)")
    p.add_argument("--network", default="random", help="of Frechet distances: inception, random or a run folder")
    p.add_argument("--weights", type=lambda text: str(typed_path(text)), metavar="FILE", help="weights of inception")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench synthesize`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_intermixed_args(argv)
    sampling = Sampling(args.ddim, args.share, args.seed)
    # TRAINING: the options of training, such as steps
    given_options = {name: getattr(args, name) for name in TRAINING if getattr(args, name) is not None}
    training = Training(**given_options)
    require(
        args.run is None or not given_options,
        f"--{next(iter(given_options), None)} is an option of training, but --run {args.run} is already trained: omit "
        "one",
    )
    check_folder("--out", args.out)
    require(
        not args.out.exists() or not any(args.out.iterdir()),
        f"--out {args.out} is not empty: name another folder, or delete its files",
    )
    for suffix in (".csv", ".png"):
        check_file("--out", args.out.with_name(args.out.name + suffix))
    require(
        args.weights is None or args.network == "inception",
        f"--weights {args.weights} is for --network inception, not for {args.network}: omit --weights",
    )
    if args.run is None:
        source = own_models(args.overrides, training, args.seed, args.config_dir)
    else:
        source = models_of_run(args.run, args.overrides, args.config_dir)
    synthesize(source, sampling, args.out, args.network, args.weights, args.client, args.config_dir)
    return 0
