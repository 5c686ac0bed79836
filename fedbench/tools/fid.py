"""The command ``fedbench fid``: Frechet distances between each client's real and extra (say, synthesized) images.

The distance of Gaussians fitted to the features of both sets is
|mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)).
It depends on the network that computes the features, so values of different networks are not comparable.  The Inception
of torchvision differs from that of TensorFlow, which most papers use.  With fewer images than features the distance is
biased upwards.

References:
    Heusel et al., NeurIPS 2017.
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
  python -m fedbench fid dataset=rsna_machines dataset.extra=synthesized partition=domain --network <run folder>

networks: inception: torchvision's Inception v3 (Inception_V3_Weights.IMAGENET1K_V1), whose default file is
data_dir/{WEIGHTS}; random: a small convolutional network with fixed random weights;
a run folder: the features of that run's global model, or of the mean of its clients' models if there is none."""


# -- distance --------------------------------------------------------------------------------------------
def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Frechet distance of the Gaussians fitted to two sets of features.

    tr (S_a S_b)^(1/2) is the sum of the singular values of R_a R_b^T for any R with R^T R = S, the covariance.  R is
    computed by a QR decomposition of the centred features, which avoids roots of rounded eigenvalues.

    Args:
        a: Features of one set of images [n, d], n >= 2.
        b: Features of the other set [m, d], m >= 2.

    Returns:
        The distance, >= 0.

    Raises:
        ConfigError: A set has fewer than two samples.
    """
    (mean_a, root_a), (mean_b, root_b) = mean_and_root(a), mean_and_root(b)
    trace_of_root = np.linalg.svd(root_a @ root_b.T, compute_uv=False).sum()
    covariance_distance = (root_a**2).sum() + (root_b**2).sum() - 2 * trace_of_root  # tr S = |R|^2
    return float(((mean_a - mean_b) ** 2).sum() + max(covariance_distance, 0.0))


def mean_and_root(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of features, and a root of their covariance.

    Args:
        features: Features of n >= 2 images, [n, d].

    Returns:
        The mean [d], and a matrix R [min(n, d), d] such that R^T R is the sample covariance.
    """
    x = np.asarray(features, np.float64)
    require(
        len(x) >= 2,
        f"a Frechet distance needs at least two samples in each set, got {len(x)}: add images, or leave out this set",
    )
    mean = x.mean(0)
    return mean, np.asarray(np.linalg.qr((x - mean) / np.sqrt(len(x) - 1), mode="r"))


# -- networks --------------------------------------------------------------------------------------------
@dataclass
class Network:
    """A network that computes the features of images whose distributions are compared.

    Attributes:
        name: Its description for the table.
        features: The function from uint8 images [b, C, H, W] to features [b, d].
    """

    name: str
    features: Callable[[Tensor], Tensor]


def make_network(
    choice: str, weights: str | None, data_dir: str, device: Any, config_dir: str | None = None
) -> Network:
    """Return the network that computes the features of images, chosen by ``--network``.

    Args:
        choice: "inception", "random" or a run folder.
        weights: The file with the weights of inception; None for the default file in data_dir.
        data_dir: The folder of data.
        device: The device that computes features.  A run folder is opened on the device of its configuration.
        config_dir: A folder with the user's own options, for a run folder.

    Raises:
        ConfigError: There is no such network or file.
    """
    if choice == "random":
        return random_network(device)
    if choice == "inception":
        return inception(Path(weights or Path(data_dir) / WEIGHTS), device)
    is_folder = choice != "" and Path(choice).is_dir()
    require(
        is_folder,
        f"--network {choice} is neither inception nor random nor a folder that exists: set inception, random, or the "
        "folder of a run",
    )
    return run_network(Path(choice), config_dir)


def random_network(device: Any, seed: int = 0) -> Network:
    """Return a network of three random 3x3 convolutions with stride 2, whose outputs are averaged over the image.

    The convolutions have 32, 64 and 128 channels, so that there are 128 features.

    Args:
        device: The device.
        seed: The seed of the weights.
    """
    from torch import nn

    from fedbench.core.rng import torch_generator

    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layer = nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False)
        std = (2 / (9 * inputs)) ** 0.5  # He initialization, which keeps the size of activations
        nn.init.normal_(layer.weight, std=std, generator=torch_generator(seed, "fid", outputs))
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device).eval()
    # pixels in [0, 1] become numbers in [-1, 1]
    return Network(f"random convolutions 3-32-64-128, seed {seed}", lambda x: net(2 * three_channels(x) - 1))


def inception(path: Path, device: Any) -> Network:
    """Return torchvision's Inception v3: 2,048 features before the last layer, of images resized to 299x299.

    Args:
        path: The file of the weights.
        device: The device.
    """
    import torch

    model = load_inception(path).to(device).eval()
    # mean and standard deviation of ImageNet, with which torchvision normalizes images
    mean = torch.tensor([0.485, 0.456, 0.406], device=device)[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225], device=device)[:, None, None]

    def features(x: Tensor) -> Tensor:
        resized = torch.nn.functional.interpolate(three_channels(x), (299, 299), mode="bilinear", antialias=True)
        return model((resized - mean) / std)

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Network(f"torchvision Inception v3, {path.name} (sha256 {digest[:8]})", features)


def load_inception(path: Path) -> Any:
    """Return Inception v3 without its last layer, with the weights of a file.

    Raises:
        ConfigError: The file does not exist or has other weights, or torchvision is missing.
    """
    import torch

    from fedbench.core.weights import read_weights

    require(
        path.is_file(),
        f"{path} does not exist, but --network inception needs {WEIGHTS}, the file of torchvision's "
        "Inception_V3_Weights.IMAGENET1K_V1: save it there, name it by --weights, or choose --network random",
    )
    try:
        from torchvision.models import inception_v3
    except ImportError as error:
        raise ConfigError(
            "--network inception needs the package torchvision, which is not installed: run pip install torchvision, "
            "or choose --network random"
        ) from error
    model = inception_v3(weights=None, init_weights=False, aux_logits=False, transform_input=False)
    model.fc = torch.nn.Identity()  # type: ignore[assignment]
    try:
        stored = read_weights(path)
        require(
            isinstance(stored, dict) and all(isinstance(name, str) for name in stored),
            f"{path} is not a state dict (a dict of tensors by name): name the file {WEIGHTS} by --weights",
        )
        # without the last layer and the auxiliary classifier, which the model does not have
        needed = {name: value for name, value in stored.items() if not name.startswith(("fc.", "AuxLogits."))}
        model.load_state_dict(needed)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{path} does not contain torchvision's Inception v3 weights ({reason[0][:120]}): name the file {WEIGHTS} "
            "by --weights"
        ) from error
    return model


def run_network(path: Path, config_dir: str | None = None) -> Network:
    """Return a network of features: a run's model without its head, as a client that joins after the run starts with.

    This is the global model, or the mean of the clients' models if the method has none.

    Args:
        path: The run folder.
        config_dir: A folder with the user's own options.
    """
    import torch

    from fedbench.simulation.new_clients import starting_row
    from fedbench.tools.export import open_run

    sim = open_run(path, config_dir=config_dir)
    federation, model = sim.engine.federation, sim.engine.model
    row = starting_row(sim.algorithm, sim.engine)  # [P], the parameters of such a client

    def features(x: Tensor) -> Tensor:
        """Return the inputs [b, d] of the last layer for uint8 images x [b, C, H, W]; ConfigError for another shape."""
        require(  # the head is the last layer of the model
            tuple(x.shape[1:]) == federation.input_shape,
            f"the model of {path} needs images of shape {federation.input_shape}, got {tuple(x.shape[1:])}: name a run "
            "on images of this shape by --network, or resize the images (dataset.resize)",
        )
        with torch.no_grad():
            return model.features(row, federation.normalized(x.to(federation.device)))

    return Network(f"{sim.cfg.choices.model} of {path} after round {sim.done}, up to its head", features)


def three_channels(x: Tensor) -> Tensor:
    """Return uint8 images [b, C, H, W] as float32 [b, 3, H, W] in [0, 1].

    A single channel is repeated.  Of more than three channels, the first three are used.

    Raises:
        ConfigError: The images have two channels.
    """
    require(x.shape[1] != 2, "fid cannot compare images with 2 channels: use images with 1 channel, or with 3 or more")
    x = x.float() / 255
    return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x[:, :3]


def features_of(network: Network, images: np.ndarray, device: Any) -> np.ndarray:
    """Return the features [n, d] of images, computed in batches.

    Args:
        network: The network.
        images: Images, uint8 [n, C, H, W].
        device: The device to which batches are copied.
    """
    import torch

    features = []
    with torch.no_grad():
        for start in range(0, len(images), BATCH):
            batch = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH])).to(device)
            features.append(network.features(batch).float().cpu().numpy())
    return np.concatenate(features)


# -- clients ---------------------------------------------------------------------------------------------
def distances_by_client(arrays: Arrays, split: Split, network: Network, device: Any) -> list[dict[str, Any]]:
    """Return, for each client, the distance between its real and its extra training images.

    Args:
        arrays: The data set.  Extra images, such as synthesized ones, have the code EXTRA in ``arrays.split``.
        split: The partition.
        network: The network that computes features.
        device: Its device.

    Returns:
        A dict per client: client (its index), silo (the name of its site; None if sites have no names), real and extra
        (numbers of training images), fid (the distance), and network (its description).  The distance is NaN for fewer
        than two real or extra images.

    Raises:
        ConfigError: The data set has no images, or no extra images.
    """
    from fedbench.data.base import EXTRA

    require(
        bool((arrays.split == EXTRA).any()),
        "there are no extra images to compare: set dataset.extra to the folder of extra training images",
    )
    images = arrays.images
    if images is None or images.dtype != np.uint8:
        raise ConfigError(
            "the data set does not consist of uint8 images: choose another data set, such as dataset=image_folder"
        )
    rows = []
    for client in range(split.num_clients):
        indices = split.train[client]
        is_extra = arrays.split[indices] == EXTRA
        num_real, num_extra = int((~is_extra).sum()), int(is_extra.sum())
        distance = float("nan")
        if min(num_real, num_extra) >= 2:
            features = features_of(network, images[indices], device)
            distance = frechet(features[~is_extra], features[is_extra])
        site = None
        if arrays.domain is not None and arrays.domain_names is not None:
            site = arrays.domain_names[int(arrays.domain[indices[0]])]
        row = {"client": client, "silo": site, "real": num_real, "extra": num_extra, "fid": distance}
        rows.append({**row, "network": network.name})
    return rows


# -- command ---------------------------------------------------------------------------------------------
def parser() -> Arguments:
    """Return the parser of the arguments of ``fedbench fid``."""
    p = arguments("fid", "Frechet distances between the real and the extra training images of each client.", EXAMPLES)
    p.add_argument("overrides", nargs="*", help="as for python -m fedbench: dataset=..., dataset.extra=... ...")
    p.add_argument("--network", default="inception",
                   help="network of features: inception, random or a run folder (default: %(default)s)")  # fmt: skip
    p.add_argument("--weights", type=lambda text: str(typed_path(text)), metavar="FILE", help="weights of inception")
    p.add_argument("--out", type=typed_path, metavar="FILE", help="write the table as CSV")
    add_config_dir(p)
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench fid`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_intermixed_args(argv)
    check_file("--out", args.out)
    require(
        not args.weights or args.network == "inception",
        f"--weights {args.weights} is for --network inception, not for {args.network}: omit --weights",
    )
    write(distances_of(args.overrides, args.network, args.weights, args.config_dir), args.out)
    return 0


def distances_of(
    overrides: list[str], choice: str, weights: str | None = None, config_dir: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows of `distances_by_client` for the data of a run with these overrides.

    Args:
        overrides: Overrides of options, such as "dataset=digits".
        choice: "inception", "random" or a run folder.
        weights: The file with the weights of inception; None for the default file.
        config_dir: A folder with the user's own options.
    """
    from fedbench.app.compose import compose
    from fedbench.config.check import check
    from fedbench.simulation import build

    cfg = compose(overrides, config_dir)
    check(cfg)
    device = build.device_of(cfg)
    network = make_network(choice, weights, cfg.data_dir, device, config_dir)  # fails before images are loaded
    arrays = build.data(cfg)
    return distances_by_client(arrays, build.partition(cfg, arrays), network, device)


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print distances as a table, and write the table as CSV.

    Args:
        rows: For each client, a dict with client, silo, numbers of real and extra images, fid and network.
        path: The CSV file; None to write no file.
    """
    from fedbench.report.table import Column, Table, render

    values = [Column("real", "real"), Column("extra", "extra"), Column("fid", "FID", missing="none")]
    columns = [Column("client", "client"), Column("silo", "silo", missing=""), *values]
    title = f"Frechet distance between real and extra training images; features: {rows[0]['network']}"
    print(render([Table(title, columns, rows)], "text"), end="")
    if path is not None:
        with_network = Table(title, [*columns, Column("network", "network")], rows)
        write_file("--out", path, lambda file: file.write(render([with_network], "csv").encode()))
        print(f"table: {path}", file=sys.stderr)
