"""``python -m fedbench fid``: the Frechet distance between each client's real and extra training pictures.

Heusel et al., NeurIPS 2017: for Gaussians fitted to the features of both sets,
|mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)).  It is a property of the network that makes the features, so the
network is always stated: numbers of different networks cannot be compared, and those of torchvision's Inception are
near, not equal, to those of the TensorFlow one that most papers use.  With fewer pictures than features it is
biased upwards, the more the fewer they are.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.destination import check_file, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, require

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.core.split import Split
    from fedbench.data.base import Arrays

WEIGHTS = "inception_v3_google-0cc3c7bd.pth"
BATCH = 64
EXAMPLES = f"""examples:
  python -m fedbench fid dataset=rsna_machines dataset.extra=synthesized partition=domain
  python -m fedbench fid dataset=image_table dataset.path=my.csv dataset.extra=more partition=domain --network random
  python -m fedbench fid dataset=rsna_machines dataset.extra=synthesized partition=domain --network <run directory>

networks: inception, torchvision's Inception v3 (Inception_V3_Weights.IMAGENET1K_V1), whose weights are looked for
in data_dir/{WEIGHTS}; random, a small convolutional network of fixed random weights;
a run directory, the global model of that run up to its head (where the method has none, the mean of its clients')."""


# -- the distance ----------------------------------------------------------------------------------------
def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance of the Gaussians fitted to features a [n, d] and b [m, d], n, m >= 2; >= 0.

    tr (S_a S_b)^(1/2) is the sum of the singular values of R_a R_b^T for any R with R^T R = S.  R comes from a QR
    decomposition of the centred features: no covariance is formed and no root taken of a rounded eigenvalue.
    """
    (mean_a, root_a), (mean_b, root_b) = fitted(a), fitted(b)
    common = np.linalg.svd(root_a @ root_b.T, compute_uv=False).sum()
    covariance_distance = (root_a**2).sum() + (root_b**2).sum() - 2 * common
    return float(((mean_a - mean_b) ** 2).sum() + max(covariance_distance, 0.0))


def fitted(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [d] and R [min(n, d), d] with R^T R the covariance (of ddof 1) of features [n, d]."""
    x = np.asarray(features, np.float64)
    require(len(x) >= 2, f"a Frechet distance needs two samples or more on each side, got {len(x)}")
    mean = x.mean(0)
    return mean, np.asarray(np.linalg.qr((x - mean) / np.sqrt(len(x) - 1), mode="r"))


# -- the networks ----------------------------------------------------------------------------------------
@dataclass
class Network:
    """name: what is said of it.  features: normalized pictures, or uint8 ones, [b, C, H, W] -> [b, d]."""

    name: str
    features: Callable[[Tensor], Tensor]


def make_network(
    choice: str, weights: str | None, data_dir: str, device: Any, config_dir: str | None = None
) -> Network:
    """inception, random, or a run directory; ConfigError where it cannot be had."""
    if choice == "random":
        return random_network(device)
    if choice == "inception":
        return inception(Path(weights or Path(data_dir) / WEIGHTS), device)
    is_folder = choice != "" and Path(choice).is_dir()
    require(is_folder, f"--network {choice}: neither inception nor random, and there is no such run directory")
    return of_run(Path(choice), config_dir)


def random_network(device: Any, seed: int = 0) -> Network:
    """Three 3x3 convolutions of stride 2 (32, 64, 128 channels) of fixed random weights, averaged over the picture."""
    from torch import nn

    from fedbench.core.rng import torch_generator

    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layer = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        nn.init.normal_(layer.weight, std=(2 / (9 * inputs)) ** 0.5, generator=torch_generator(seed, "fid", outputs))
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device).eval()
    return Network(f"random convolutions 3-32-64-128, seed {seed}", lambda x: net(2 * three_channels(x) - 1))


def inception(path: Path, device: Any) -> Network:
    """torchvision's Inception v3: the 2,048 numbers before its last layer, of pictures brought to 299x299."""
    import torch

    model = load_inception(path).to(device).eval()
    mean = torch.tensor([0.485, 0.456, 0.406], device=device)[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225], device=device)[:, None, None]

    def features(x: Tensor) -> Tensor:
        large = torch.nn.functional.interpolate(three_channels(x), (299, 299), mode="bilinear", antialias=True)
        return model((large - mean) / std)

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Network(f"torchvision Inception v3, {path.name} (sha256 {digest[:8]})", features)


def load_inception(path: Path) -> Any:
    """The network with the weights of a file, without its last layer; ConfigError where there are none."""
    import torch

    from fedbench.core.weights import read_weights

    require(
        path.is_file(),
        f"{path} is not there: --network inception needs the file of torchvision's Inception_V3_Weights.IMAGENET1K_V1, "
        f"{WEIGHTS}; put it there or give its place with --weights, or choose --network random or a run directory",
    )
    try:
        from torchvision.models import inception_v3
    except ImportError as error:
        raise ConfigError("--network inception needs torchvision: pip install torchvision") from error
    model = inception_v3(weights=None, init_weights=False, aux_logits=False, transform_input=False)
    model.fc = torch.nn.Identity()  # type: ignore[assignment]
    try:
        stored = read_weights(path)
        require(isinstance(stored, dict) and all(isinstance(name, str) for name in stored), "it is no state dict")
        used = {name: value for name, value in stored.items() if not name.startswith(("fc.", "AuxLogits."))}
        model.load_state_dict(used)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{path} does not hold torchvision's Inception v3 weights ({reason[0][:120]})") from error
    return model


def of_run(path: Path, config_dir: str | None = None) -> Network:
    """The model of a run up to its head, at the row from which a new client would start."""
    import torch

    from fedbench.simulation.new_clients import starting_row
    from fedbench.tools.export import open_run

    sim = open_run(path, config_dir=config_dir)
    federation, model = sim.engine.federation, sim.engine.model
    row = starting_row(sim.algorithm, sim.engine)

    def features(x: Tensor) -> Tensor:
        require(
            tuple(x.shape[1:]) == federation.input_shape,
            f"the model of {path} takes pictures of shape {federation.input_shape}, these are {tuple(x.shape[1:])}",
        )
        with torch.no_grad():
            return model.features(row, federation.normalized(x.to(federation.device)))

    return Network(f"{sim.cfg.choices.model} of {path} after round {sim.done}, up to its head", features)


def three_channels(x: Tensor) -> Tensor:
    """uint8 pictures [b, C, H, W] as float32 [b, 3, H, W] in [0, 1]; grey ones three times."""
    x = x.float() / 255
    return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x[:, :3]


def features_of(network: Network, images: np.ndarray, device: Any) -> np.ndarray:
    """Features [n, d] of uint8 pictures [n, C, H, W], a few at a time."""
    import torch

    features = []
    with torch.no_grad():
        for start in range(0, len(images), BATCH):
            batch = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH])).to(device)
            features.append(network.features(batch).float().cpu().numpy())
    return np.concatenate(features)


# -- the clients -----------------------------------------------------------------------------------------
def by_client(arrays: Arrays, split: Split, network: Network, device: Any) -> list[dict[str, Any]]:
    """For each client: its number and silo, how many real and extra training pictures, their distance (NaN where
    there are fewer than two of either)."""
    from fedbench.data.base import EXTRA

    require(bool((arrays.split == EXTRA).any()), "no extra pictures: set dataset.extra to the synthesized ones")
    images = arrays.images
    if images is None or images.dtype != np.uint8:
        raise ConfigError("the distance is between pictures (uint8 images), which this data set does not consist of")
    rows = []
    for client in range(split.num_clients):
        indices = split.train[client]
        extra = arrays.split[indices] == EXTRA
        enough = min(int(extra.sum()), int((~extra).sum())) >= 2
        distance = float("nan")
        if enough:
            features = features_of(network, images[indices], device)
            distance = frechet(features[~extra], features[extra])
        names, domain = arrays.domain_names, None if arrays.domain is None else int(arrays.domain[indices[0]])
        silo = None if names is None or domain is None else names[domain]
        rows.append({"client": client, "silo": silo, "real": int((~extra).sum()), "extra": int(extra.sum()),
                     "fid": distance, "network": network.name})  # fmt: skip
    return rows


# -- the command -----------------------------------------------------------------------------------------
def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments("fid", "Frechet distance between every client's real and extra training pictures.", EXAMPLES)
    p.add_argument("overrides", nargs="*", help="as for python -m fedbench: dataset=..., dataset.extra=... ...")
    p.add_argument("--network", default="inception", help="inception, random or a run directory (default: %(default)s)")
    p.add_argument("--weights", type=lambda text: str(typed_path(text)), metavar="FILE", help="of inception")
    p.add_argument("--out", type=typed_path, metavar="FILE", help="write the table as CSV")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_intermixed_args(argv)
    check_file("--out", args.out)
    require(
        not args.weights or args.network == "inception",
        f"--weights {args.weights} are of --network inception, not of {args.network}",
    )
    write(measured(args.overrides, args.network, args.weights, args.config_dir), args.out)
    return 0


def measured(
    overrides: list[str], choice: str, weights: str | None = None, config_dir: str | None = None
) -> list[dict[str, Any]]:
    """Return `by_client` of the data that a run with these overrides would use."""
    from fedbench.app.compose import compose
    from fedbench.config.check import check
    from fedbench.simulation import build

    cfg = compose(overrides, config_dir)
    check(cfg)
    device = build.device_of(cfg)
    network = make_network(choice, weights, cfg.data_dir, device, config_dir)  # before the pictures, which take longer
    arrays = build.data(cfg)
    return by_client(arrays, build.partition(cfg, arrays), network, device)


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the table, and write it where a file is named."""
    from fedbench.report.table import Column, Table, render

    numbers = [Column("real", "real"), Column("extra", "extra"), Column("fid", "FID", none="none")]
    columns = [Column("client", "client"), Column("silo", "silo", none=""), *numbers]
    title = f"Frechet distance between real and extra training pictures; features: {rows[0]['network']}"
    print(render([Table(title, columns, rows)], "text"), end="")
    if path is not None:
        wide = Table(title, [*columns, Column("network", "network")], rows)
        write_file("--out", path, lambda file: file.write(render([wide], "csv").encode()))
        print(f"table: {path}", file=sys.stderr)
