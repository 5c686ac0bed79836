"""``python -m fedbench synthesize``: pictures for training only, from diffusion models.

Either every client trains a model of its own, of its own training pictures alone; or, with --run, it draws from the
model that it deploys after a run of task=denoising, under any method.  Pictures go to <out>/<silo>/<class>/, which
`dataset.extra` reads, measures to <out>.csv and a sheet of samples to <out>.png.
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

SHOWN = 8  # samples of each class on the sheet
MOST_LINES = 60  # of the sheet
AT_ONCE = 128  # pictures sampled together
MOST_SHARE = 1000
NO_FOLDER = re.compile(r"|\.{1,2}|.*[/\\\0].*", re.DOTALL)  # names that lead elsewhere, or nowhere
TRAINING = {
    "steps": "of a client's own training",
    "batch": "pictures a step",
    "lr": "of Adam at first",
    "width": "channels of the first level",
    "decay": "of the weights' running mean",
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
    """Of a client's own model; decay: of the running mean of its weights."""

    steps: int = 1500
    batch: int = 32
    lr: float = 0.002
    width: int = 16
    decay: float = 0.99

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1, got {getattr(self, name)}")
        require(self.width >= 8 and self.width % 8 == 0, f"--width must be a multiple of 8, got {self.width}")
        require(0 < self.lr < math.inf, f"--lr must be above 0 and finite, got {self.lr}")
        require(0 <= self.decay < 1, f"--decay must be in [0, 1), got {self.decay}")


@dataclass(frozen=True)
class Sampling:
    """ddim: steps of a picture.  share: synthesized pictures per real training picture of the same class."""

    ddim: int
    share: float
    seed: int

    def __post_init__(self) -> None:
        require(self.ddim >= 1, f"--ddim must be at least 1, got {self.ddim}")
        require(0 < self.share <= MOST_SHARE, f"--share must be above 0 and at most {MOST_SHARE}, got {self.share}")


@dataclass(frozen=True)
class Learned:
    """What a client draws from: what predicts velocities, of which schedule; facts: further columns of its row."""

    predict: Predictor
    schedule: Schedule
    facts: dict[str, float]


def learn(
    images: np.ndarray, labels: np.ndarray, num_classes: int, training: Training, seed: int, client: int
) -> Learned:
    """A client's own model: images uint8 [n, C, H, W] and their classes are all that it sees."""
    import torch

    from fedbench.core.rng import torch_generator
    from fedbench.synthesis.diffusion import train
    from fedbench.tasks.denoising import Schedule

    schedule, x = Schedule.cosine(), torch.from_numpy(images).float() / 127.5 - 1
    model, losses = train(
        x, torch.from_numpy(labels), num_classes, schedule, generator=torch_generator(seed, "synthesize", client),
        **vars(training),
    )  # fmt: skip
    loss = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    require(math.isfinite(loss), f"--lr {training.lr}: the training of client {client} diverged; choose a smaller one")
    return Learned(model, schedule, {"loss": loss})


def draw(
    learned: Learned, labels: np.ndarray, num_classes: int, shape: tuple[int, ...], sampling: Sampling, client: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures uint8 [m, C, H, W] and classes [m]: round(share n_class) of each class, at least one where labels [n]
    has any."""
    import torch
    import torch.nn.functional as F

    from fedbench.core.rng import torch_generator
    from fedbench.synthesis.diffusion import ddim

    generator = torch_generator(sampling.seed, "samples", client)
    counts = np.bincount(labels, minlength=num_classes)
    wanted = np.where(counts > 0, np.maximum(1, np.rint(counts * sampling.share)), 0).astype(np.int64)
    asked, made = torch.from_numpy(np.repeat(np.arange(num_classes), wanted)), []
    with torch.no_grad():
        for some in asked.split(AT_ONCE):
            start, label = torch.randn(len(some), *shape, generator=generator), F.one_hot(some, num_classes).float()
            made.append(ddim(learned.predict, learned.schedule, start, label, sampling.ddim))
    require(all(bool(x.isfinite().all()) for x in made), f"client {client}: what its model draws is not finite")
    pictures = ((torch.cat(made) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pictures.numpy(), asked.numpy()


def write_client(folder: Path, silo: str, names: list[str], pictures: np.ndarray, labels: np.ndarray) -> None:
    """<folder>/<silo>/<class>/<number>.png."""
    from PIL import Image

    for i, (picture, label) in enumerate(zip(pictures, labels)):
        grey = picture.shape[0] == 1
        drawn = Image.fromarray(picture[0] if grey else np.ascontiguousarray(picture.transpose(1, 2, 0)))
        path = folder / silo / names[label] / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file("--out", path, lambda file, drawn=drawn: drawn.save(file, format="PNG"))


def measured(
    real: np.ndarray,
    classes: np.ndarray,
    held_out: np.ndarray,
    made: np.ndarray,
    asked: np.ndarray,
    network: Any,
    seed: int,
) -> dict[str, float]:
    """A client's row of the table: distances with their bounds, neighbours, diversity of real and made pictures."""
    from fedbench.core.rng import generator
    from fedbench.synthesis.measures import bounds, diversity, neighbours
    from fedbench.tools.fid import features_of, frechet

    def features(pictures: np.ndarray) -> np.ndarray:
        return features_of(network, pictures, "cpu")

    return {
        **bounds(real, made, features, frechet, generator(seed, "bounds")),
        **neighbours(made, real, held_out),
        "diversity": diversity(made, asked),
        "diversity_real": diversity(real, classes),
    }


def pictures_of(arrays: Arrays) -> tuple[np.ndarray, list[str], list[str]]:
    """Images, names of silos and of classes; ConfigError where the data set is not of labelled pictures of silos."""
    from fedbench.data.base import EXTRA

    images = arrays.images
    if images is None or images.dtype != np.uint8 or arrays.task != "classification":
        raise ConfigError("synthesized are pictures (uint8 images) with one class each, which this data set has not")
    if arrays.domain_names is None or arrays.class_names is None:
        raise ConfigError("dataset.extra goes by names of silos and classes, which this data set has not")
    require(not (arrays.split == EXTRA).any(), "dataset.extra is set: a generator is to learn from real pictures alone")
    odd = [name for name in [*arrays.domain_names, *arrays.class_names] if NO_FOLDER.fullmatch(name)]
    require(not odd, f"{(odd or [''])[0]!r} is no name of a folder, and silos and classes become folders of --out")
    return images, arrays.domain_names, arrays.class_names


def silos_of(arrays: Arrays, split: Split, clients: int) -> list[str]:
    """The silo of each of the first `clients` clients; ConfigError unless each has one, and one of its own."""
    found: dict[str, int] = {}
    for client in range(clients):
        own = np.unique(arrays.domain[split.train[client]])  # type: ignore[index]
        silos = [arrays.domain_names[at] for at in own.tolist()]  # type: ignore[index]
        one = "pictures are written by silo, one client a silo: choose partition=domain"
        require(len(silos) == 1, f"client {client} has pictures of {len(silos)} silos, and {one}")
        require(silos[0] not in found, f"clients {found.get(silos[0])} and {client} share silo {silos[0]}, and {one}")
        found[silos[0]] = client
    return list(found)


@dataclass(frozen=True)
class Source:
    """Pictures, who has which of them, and from what each of the first `clients` clients draws: learned(client);
    is_shared: whether others' training parts may be in that."""

    data_dir: str
    arrays: Arrays
    split: Split
    clients: int
    learned: Callable[[int], Learned]
    is_shared: bool


def own_models(overrides: list[str], training: Training, seed: int, config_dir: str | None = None) -> Source:
    """Every client learns from its own training part."""
    from fedbench.app.compose import compose
    from fedbench.config.check import check
    from fedbench.simulation import build

    cfg = compose(overrides, config_dir)
    check(cfg)
    arrays = build.data(cfg)
    images, _, _ = pictures_of(arrays)
    split: Split = build.partition(cfg, arrays)

    def learned(client: int) -> Learned:
        mine = split.train[client]
        return learn(images[mine], arrays.targets[mine], arrays.num_classes, training, seed, client)

    return Source(cfg.data_dir, arrays, split, split.num_clients, learned, False)


def models_of_run(path: Path, overrides: list[str], config_dir: str | None = None) -> Source:
    """Every client draws from the model that it would deploy after a run.  overrides: as for `open_run`."""
    from fedbench.algorithms.base import Algorithm
    from fedbench.simulation import build
    from fedbench.tasks.denoising import Denoising
    from fedbench.tools.export import client_module, open_run

    sim = open_run(path, overrides, config_dir)
    task, arrays = sim.engine.task, build.data(sim.cfg)
    if not isinstance(task, Denoising):
        raise ConfigError(f"--run {path}: pictures are drawn from runs of task=denoising, not of {task.kind}")
    method = type(sim.algorithm)
    require(
        method.predict is Algorithm.predict,
        f"--run {path}: {method.__name__} predicts with more than one module, which pictures are drawn from",
    )
    schedule = task.schedule.to("cpu")
    return Source(
        sim.cfg.data_dir,
        arrays,
        build.partition(sim.cfg, arrays),
        sim.engine.federation.num_clients,  # without those that come after training
        lambda client: Learned(client_module(sim, client), schedule, {}),
        True,
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
    """Draw, write and measure, client by client; only: these clients (None: all)."""
    from fedbench.synthesis.measures import neighbours
    from fedbench.tools.fid import make_network

    arrays, split = source.arrays, source.split
    images, _, names = pictures_of(arrays)
    silos = silos_of(arrays, split, source.clients)
    clients = list(range(source.clients)) if only is None else only
    odd = [client for client in clients if client not in range(source.clients)]
    require(not odd, f"--client {(odd or [None])[0]}: the clients are 0 to {source.clients - 1}")
    require(len(set(clients)) == len(clients), "--client: one of them is named twice")
    network = make_network(choice, weights, source.data_dir, "cpu", config_dir)
    rows, sheet = [], []
    try:
        for client in clients:
            train, test, silo = split.train[client], split.test[client], silos[client]
            real, classes, learned = images[train], arrays.targets[train], source.learned(client)
            made, asked = draw(learned, classes, arrays.num_classes, images.shape[1:], sampling, client)
            write_client(out, silo, names, made, asked)
            row = {"client": client, "silo": silo, "real": len(real), "synthesized": len(made), **learned.facts}
            row |= measured(real, classes, images[test], made, asked, network, sampling.seed)
            if source.is_shared and source.clients > 1:
                others = np.concatenate([split.train[other] for other in range(source.clients) if other != client])
                row |= {f"{name}_others": x for name, x in neighbours(made, images[others], images[test]).items()}
            rows.append(row)
            print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
            write_table(rows, network.name, out)  # after every client: what there is outlives an interruption
            for label in np.unique(asked):
                sheet.append((f"{silo}, {names[label]}", real[classes == label][:SHOWN], made[asked == label][:SHOWN]))
    finally:
        if sheet:
            write_sheet(sheet[:MOST_LINES], out)


def write_table(rows: list[dict[str, Any]], network: str, out: Path) -> None:
    """<out>.csv."""
    import csv
    import io

    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0], "network"], lineterminator="\n")
    table.writeheader()
    table.writerows([{**row, "network": network} for row in rows])
    write_file("--out", out.with_name(out.name + ".csv"), lambda file: file.write(text.getvalue().encode()))


def write_sheet(sheet: list[tuple[str, np.ndarray, np.ndarray]], out: Path) -> None:
    """<out>.png: a line for each silo and class, its first real pictures and its first synthesized ones."""
    from fedbench.report.drawing import pyplot

    plt = pyplot()
    figure, grid = plt.subplots(
        len(sheet), 2 * SHOWN, figsize=(1.2 * SHOWN + 2, 0.65 * len(sheet) + 0.6), squeeze=False, layout="constrained"
    )
    for line, (name, real, made) in zip(grid, sheet):
        for place, axes in enumerate(line):
            axes.set(xticks=[], yticks=[])
            shown = (real if place < SHOWN else made)[place % SHOWN :][:1]
            if len(shown):
                axes.imshow(
                    shown[0, 0] if shown.shape[1] == 1 else shown[0].transpose(1, 2, 0), "gray", vmin=0, vmax=255
                )
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7, parse_math=False)
    grid[0][0].set_title("real training pictures", fontsize=8, loc="left")
    grid[0][SHOWN].set_title("synthesized", fontsize=8, loc="left")
    path = out.with_name(out.name + ".png")
    write_file("--out", path, lambda file: figure.savefig(file, dpi=110, format="png"))
    plt.close(figure)


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments(
        "synthesize",
        "Draw pictures for training only, from a diffusion model of each client's own training part or "
        "from the models of a run.",
        EXAMPLES,
    )
    p.add_argument("overrides", nargs="*", help="as for python -m fedbench: dataset=... partition=domain ...")
    p.add_argument("--out", type=typed_path, default=Path("synthesized"), metavar="FOLDER", help="default: %(default)s")
    p.add_argument(
        "--run", type=typed_path, metavar="FOLDER", help="draw from a run of task=denoising; nothing is trained"
    )
    p.add_argument("--client", type=int, action="append", metavar="N", help="one to do, again for each (all)")
    for name, what in TRAINING.items():
        default = getattr(Training, name)
        p.add_argument(f"--{name}", type=type(default), help=f"{what} (default: {default})")
    p.add_argument("--ddim", type=int, default=25, help="steps of sampling (default: %(default)s)")
    p.add_argument("--share", type=float, default=1.0, help="synthesized per real picture (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of weights, batches, noise (default: %(default)s)")
    p.add_argument("--network", default="random", help="of distances: inception, random or a run directory")
    p.add_argument("--weights", type=lambda text: str(typed_path(text)), metavar="FILE", help="of inception")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_intermixed_args(argv)
    sampling, given = Sampling(args.ddim, args.share, args.seed), {k: getattr(args, k) for k in TRAINING}
    given = {name: value for name, value in given.items() if value is not None}
    training = Training(**given)
    require(
        args.run is None or not given,
        f"--{next(iter(given), None)} is of a training, and --run {args.run} draws from one that is over",
    )
    check_folder("--out", args.out)
    require(not args.out.exists() or not any(args.out.iterdir()), f"--out {args.out} is not empty")
    for suffix in (".csv", ".png"):
        check_file("--out", args.out.with_name(args.out.name + suffix))
    require(args.weights is None or args.network == "inception", "--weights is of --network inception")
    if args.run is None:
        source = own_models(args.overrides, training, args.seed, args.config_dir)
    else:
        source = models_of_run(args.run, args.overrides, args.config_dir)
    synthesize(source, sampling, args.out, args.network, args.weights, args.client, args.config_dir)
    return 0
