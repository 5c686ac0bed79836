"""MNIST and Fashion-MNIST from the original idx files: 60,000 train and 10,000 test images, 28x28 grey.

Sources: LeCun et al., 1998 (mirrored); Xiao et al., Fashion-MNIST, 2017 (github.com/zalandoresearch/fashion-mnist).
Licences: MNIST CC BY-SA 3.0, Fashion-MNIST MIT.
Layout; without ``path``, the first that exists is read, else the idx files are downloaded::

    data_dir/
        mnist.npz, fashion_mnist.npz      layout of MedMNIST; the converted download
        mnist/, fashion_mnist/            the four idx files, plain or .gz
        MNIST/raw/, FashionMNIST/raw/     the same, as torchvision stores them
"""

import gzip
import math
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError
from fedbench.data._files import DAMAGE, download, require_memory, store
from fedbench.data.arrays.npz import from_layout, resized
from fedbench.data.base import Arrays
from fedbench.data.images._published import DownloadedImages, Published

IDX_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


class MNIST(DownloadedImages):
    """MNIST.  `path` is an npz of the MedMNIST layout, or a folder with the four idx files."""

    name = "mnist"
    torchvision_folder = "MNIST"
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    )
    md5 = {
        "train_images": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train_labels": "d53e105ee54ea40749a09fcbcd1e9432",
        "test_images": "9fb629c4189551a2d022fa330f9573f3",
        "test_labels": "ec29112dd5afa0611ce80d1b7f02629c",
    }
    classes = tuple(map(str, range(10)))

    def load(self) -> Arrays:
        """Return the images in the files, which are downloaded and converted if they do not exist.

        Raises:
            ConfigError: The files do not exist and cannot be downloaded, or are other files.
        """
        counts = {"train": 60_000, "test": 10_000}
        published = Published(self.name, channels=1, sides=[28], classes=self.classes, counts=counts)
        data_dir = Path(self.data_dir)
        npz = data_dir / f"{self.name}.npz" if self.path is None else Path(self.path)
        if npz.is_file() or (self.path is not None and not npz.is_dir()):  # read refuses a file that does not exist
            return published.read(npz, options=self)
        folders = [npz] if self.path else [data_dir / self.name, data_dir / self.torchvision_folder / "raw"]
        # from key ("train_images", ...) to path
        files = next((files for folder in folders if (files := idx_files(folder))), None)
        if files is None and self.path is not None:
            raise ConfigError(
                f"dataset.path={npz} does not contain {', '.join(IDX_FILES.values())} (plain or .gz): set it to the "
                "folder of these files, or to null to download them"
            )
        files = files or self._download(data_dir / self.name)
        named_arrays = {key: read_idx(path) for key, path in files.items()}
        source = files["train_images"]  # stands for the four files in messages, and in the cache of resized images
        arrays = published.check(from_layout(named_arrays, str(source.parent), "classification"), str(source.parent))
        if self.path is None:  # the next start finds the npz
            store(npz, named_arrays)
        return resized(arrays, self.resize, self.data_dir, source)

    def _download(self, folder: Path) -> dict[str, Path]:
        """Download the four gzipped idx files to a folder, and return a dict from key ("train_images", ...) to path.

        The options mirror (an address instead of the usual ones) and verify (whether the md5 is checked) are used.
        """
        addresses = [base.rstrip("/") for base in ([self.mirror] if self.mirror else self.mirrors)]
        files = {}
        for key, name in IDX_FILES.items():
            urls = [f"{address}/{name}.gz" for address in addresses]
            files[key] = download(urls, folder / f"{name}.gz", self.md5[key] if self.verify else None, self.name)
        return files


class FashionMNIST(MNIST):
    """Fashion-MNIST, in the format of MNIST."""

    name = "fashion_mnist"
    torchvision_folder = "FashionMNIST"
    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",)
    md5 = {
        "train_images": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train_labels": "25c81989df183df01b3e8a0aad5dffbe",
        "test_images": "bef4ecab320f06d8554ea6380940ec79",
        "test_labels": "bb300cfdad3c16e7a12a480ee83cd310",
    }
    classes = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def idx_files(folder: Path) -> dict[str, Path] | None:
    """Return a dict from key ("train_images", ...) to idx file (plain or .gz) of a folder; None if one is missing."""
    files = {}
    for key, name in IDX_FILES.items():  # name: without .gz
        path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
        if path is None:
            return None
        files[key] = path
    return files


def read_idx(path: Path) -> np.ndarray:
    """Return the array in a uint8 idx file, plain or .gz.

    The format is two zero bytes, 8 (the type uint8), the number of dimensions, big-endian sizes, data.

    Args:
        path: The file.

    Raises:
        ConfigError: The file is damaged, or its data do not fit in memory.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            magic = file.read(4)
            if magic[:3] != b"\x00\x00\x08":
                raise ValueError(
                    f"it begins with {magic[:3]!r}, but an idx file of bytes begins with the bytes 0, 0 and 8"
                )
            shape = np.frombuffer(file.read(4 * magic[3]), ">u4").tolist()
            size = math.prod(shape)
            require_memory(size, str(path))
            data = file.read(size + 1)  # one byte more, to detect a file that is too long
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (*DAMAGE, IndexError) as error:
        raise ConfigError(f"{path} is damaged or not an idx file ({error}): delete it to download it again") from error
