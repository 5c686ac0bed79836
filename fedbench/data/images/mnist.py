"""MNIST and Fashion-MNIST from the original idx files: 60,000 train and 10,000 test images, 28x28 grey.

Sources: LeCun et al., 1998 (mirrored); Xiao et al., Fashion-MNIST, 2017 (github.com/zalandoresearch/fashion-mnist).
Licences: MNIST CC BY-SA 3.0, Fashion-MNIST MIT.
Layout, of which the first that is found is read, after ``path`` and before a download::

    data_dir/
        mnist.npz, fashion_mnist.npz      layout of MedMNIST; the converted download
        mnist/, fashion_mnist/            the four idx files, plain or .gz
        MNIST/raw/, FashionMNIST/raw/     the same, as torchvision stores them
"""

import gzip
import math
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, Count
from fedbench.data._files import DAMAGE, download, log, require_memory, write_npz
from fedbench.data._published import Published
from fedbench.data.arrays.npz import from_layout, load_known, resized
from fedbench.data.base import Arrays

IDX_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


class MNIST:
    """path: an npz of the MedMNIST layout, or a folder with the four idx files; None: see the module's words.

    resize: side in pixels.  mirror: address of a folder to download from instead of the known ones.
    verify: refuse a download whose md5 is not the published one.
    """

    name = "mnist"
    folder = "MNIST"  # torchvision's
    mirrors = [
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ]
    md5 = {
        "train_images": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train_labels": "d53e105ee54ea40749a09fcbcd1e9432",
        "test_images": "9fb629c4189551a2d022fa330f9573f3",
        "test_labels": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    classes = [str(c) for c in range(10)]

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        resize: Count | None = None,
        mirror: str | None = None,
        verify: bool = True,
    ):
        self.data_dir, self.path, self.resize = Path(data_dir), path, resize
        self.mirror, self.verify = mirror, verify

    def load(self) -> Arrays:
        """Read, or download and convert; ConfigError says which file to put where."""
        known = Published(self.name, 1, [28], self.classes, {"train": 60_000, "test": 10_000})
        ready = Path(self.path) if self.path is not None else self.data_dir / f"{self.name}.npz"
        if not ready.is_dir() and (ready.is_file() or self.path is not None):
            return load_known(ready, str(self.data_dir), self.resize, known)
        folders = [ready] if ready.is_dir() else [self.data_dir / self.name, self.data_dir / self.folder / "raw"]
        raw = next((f for f in folders if idx_paths(f)), None)
        if raw is None and self.path is not None:
            raise ConfigError(f"{ready} does not hold {', '.join(IDX_FILES.values())} (plain or .gz)")
        paths = idx_paths(raw) if raw else self._download()
        file = {key: read_idx(path) for key, path in paths.items()}
        arrays = known.check(from_layout(file, str(ready), "classification"), str(raw or ready))
        if self.path is None:
            try:
                write_npz(ready, **file)
            except OSError as error:
                log.warning("could not write %s (%s): every start converts again", ready, error)
        return resized(arrays, self.resize, str(self.data_dir), paths["train_images"])

    def _download(self) -> dict[str, Path]:
        folder = self.data_dir / self.name
        bases = [self.mirror] if self.mirror is not None else self.mirrors
        return {
            key: download(
                [f"{base.rstrip('/')}/{name}.gz" for base in bases],
                folder / f"{name}.gz",
                self.md5[key] if self.verify else None,
                self.name,
            )
            for key, name in IDX_FILES.items()
        }


class FashionMNIST(MNIST):
    """Fashion-MNIST: the same files, other pictures."""

    name = "fashion_mnist"
    folder = "FashionMNIST"
    mirrors = ["http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"]
    md5 = {
        "train_images": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train_labels": "25c81989df183df01b3e8a0aad5dffbe",
        "test_images": "bef4ecab320f06d8554ea6380940ec79",
        "test_labels": "bb300cfdad3c16e7a12a480ee83cd310",
    }
    classes = [
        "T-shirt",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ]


def idx_paths(folder: Path) -> dict[str, Path] | None:
    """The four idx files of a folder, plain or .gz; None unless all are there."""
    paths = {}
    for key, name in IDX_FILES.items():
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        if path is None:
            return None
        paths[key] = path
    return paths


def read_idx(path: Path) -> np.ndarray:
    """A uint8 idx file, plain or .gz: two zero bytes, 8, the number of dimensions, big-endian sizes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            magic = file.read(4)
            if magic[:3] != b"\x00\x00\x08":
                raise ValueError("not an idx file of bytes")
            shape = np.frombuffer(file.read(4 * magic[3]), ">u4").tolist()
            size = math.prod(shape)
            require_memory(size, str(path))
            data = file.read(size + 1)  # one byte more, to detect a file that is too long
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (*DAMAGE, IndexError) as error:
        raise ConfigError(f"{path} is damaged or no idx file ({error}): delete it and start again") from error
