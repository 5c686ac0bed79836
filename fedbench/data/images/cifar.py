"""CIFAR-10 and CIFAR-100: 50,000 train and 10,000 test images, 32x32 colour, as published.

Source: Krizhevsky, Learning multiple layers of features from tiny images, 2009 (cs.toronto.edu/~kriz/cifar.html).
Licence: none is stated; used for research.
Layout, of which the first that is found is read, after ``path`` and before a download::

    data_dir/
        cifar10.npz, cifar100.npz                         the converted download
        cifar-10-binary.tar.gz, cifar-10-batches-bin/     the binary version, which is downloaded
        cifar-10-python.tar.gz, cifar-10-batches-py/      the Python version, as torchvision stores it
        cifar10_jpeg.npz

CIFAR-100 has the same archives under its name.  The pickles of the Python version are read without running them.

A JPEG file (``jpeg``, ``offset``, ``label``, ``is_test``, ``classes``: every image a JPEG stream, end to end)
is lossy: accuracies are close to, not equal to, those on the original, and the images are in another order.
"""

import io
import tarfile
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, require
from fedbench.data._files import DAMAGE, cached, download, fingerprint, log, read_npz, write_npz
from fedbench.data._images import fill, half, resize
from fedbench.data._pickled import read_plain
from fedbench.data._published import Published
from fedbench.data.arrays.npz import from_layout, load_known, resized
from fedbench.data.base import TEST, TRAIN, Arrays

PIXELS = 3 * 32 * 32


class CIFAR10:
    """CIFAR-10, from a file or from the network.

    Args:
        path: An npz (MedMNIST layout or JPEG), an archive or its extracted folder.  None: see above.
        resize: Side in pixels.
        mirror: Address of a folder to download the archive from instead.
        verify: Refuse a download whose md5 is not the published one.
        statistics: Statistics of the pixels for normalization: half (mean and deviation 0.5) or own (of the train
            images).
    """

    name = "cifar10"
    archive = "cifar-10-binary.tar.gz"
    folder = "cifar-10-batches-bin"
    md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    members = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
    names_file = "batches.meta.txt"
    python_archive = "cifar-10-python.tar.gz"
    python_folder = "cifar-10-batches-py"
    python_members = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    python_names = "batches.meta", "label_names"  # the file, and the key in it
    python_labels = "labels"
    label_bytes = 1  # the label is the last of them
    num_classes = 10
    names = "airplane automobile bird cat deer dog frog horse ship truck"  # for files that carry none
    own = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # mean and deviation per channel, as is usual

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        resize: Count | None = None,
        mirror: str | None = None,
        verify: bool = True,
        statistics: Literal["half", "own"] = "half",
    ):
        self.data_dir, self.path, self.resize = Path(data_dir), path, resize
        self.mirror, self.verify = mirror, verify
        self.statistics: Literal["half", "own"] = statistics

    def load(self) -> Arrays:
        """Read, or download and convert; ConfigError says which file to put where."""
        source = Path(self.path) if self.path is not None else self._find()
        require(
            source.exists(),
            f"{source} is not there: dataset.path is an npz, {self.archive}, {self.python_archive}, or the folder "
            f"{self.folder} or {self.python_folder}",
        )
        if source.suffix == ".npz":
            arrays = self._from_npz(source)
        else:
            file = self._convert(source)
            arrays = self._known().check(from_layout(file, str(source), "classification"), str(source))
            if self.path is None:
                self._keep(file)
            arrays = resized(arrays, self.resize, str(self.data_dir), source)
        arrays.published_scaling = self.own
        if self.statistics == "own":
            arrays.mean, arrays.std = self.own
        return arrays

    def _known(self, side: int = 32) -> Published:
        return Published(self.name, 3, [side], self.names.split(), {"train": 50_000, "test": 10_000})

    def _find(self) -> Path:
        stored = self.archive, self.folder, self.python_archive, self.python_folder
        names = (f"{self.name}.npz", *stored, f"{self.name}_jpeg.npz")
        file = next((p for p in (self.data_dir / name for name in names) if p.exists()), None)
        if file is not None:
            return file
        base = (self.mirror or "https://www.cs.toronto.edu/~kriz").rstrip("/")
        md5 = self.md5 if self.verify else None
        return download([f"{base}/{self.archive}"], self.data_dir / self.archive, md5, self.name)

    def _keep(self, file: dict[str, np.ndarray]) -> None:
        try:
            write_npz(self.data_dir / f"{self.name}.npz", **file)
        except OSError as error:
            log.warning("could not keep the converted %s (%s): every start converts again", self.name, error)

    def _convert(self, source: Path) -> dict[str, np.ndarray]:
        """Return an archive or its folder in the MedMNIST layout: images [n, 3, 32, 32], labels [n]."""
        members = *chain(*self.members.values()), self.names_file
        pickled = *chain(*self.python_members.values()), self.python_names[0]
        try:
            raw = read_members(source, [self.folder, self.python_folder], [*members, *pickled])
            if set(pickled) <= set(raw):
                return self._from_python(source, raw)
            file = {"classes": np.array(raw[self.names_file].decode().split())}
            for part, names in self.members.items():
                data = np.frombuffer(b"".join(raw[name] for name in names), np.uint8)
                records = data.reshape(-1, self.label_bytes + PIXELS)  # [n, labels and pixels]
                file[f"{part}_images"] = records[:, self.label_bytes :].reshape(-1, 3, 32, 32)
                file[f"{part}_labels"] = records[:, self.label_bytes - 1]
            return file
        except DAMAGE as error:
            raise ConfigError(f"{source} is damaged or not {self.name} as published ({error})") from error

    def _from_python(self, source: Path, raw: dict[str, bytes]) -> dict[str, np.ndarray]:
        """Read the Python version: pickled dicts of images [n, 3 * 32 * 32] uint8 and a list of labels."""
        meta, key = self.python_names
        try:
            file = {"classes": np.array([str(name) for name in read_plain(raw[meta])[key]])}
            for part, names in self.python_members.items():
                batches = [read_plain(raw[name]) for name in names]
                images = np.concatenate([batch["data"] for batch in batches])
                if images.dtype != np.uint8:
                    raise ValueError(f"images are {images.dtype}, expected uint8")
                file[f"{part}_images"] = images.reshape(-1, 3, 32, 32)
                file[f"{part}_labels"] = np.array([y for batch in batches for y in batch[self.python_labels]], np.int64)
            return file
        except Exception as error:  # a damaged pickle may raise any exception
            raise ConfigError(f"{source} is damaged or not {self.name}'s Python version ({error})") from error

    def _from_npz(self, path: Path) -> Arrays:
        if not is_jpeg_layout(path):
            return load_known(path, str(self.data_dir), self.resize, self._known())
        log.info("%s holds JPEG images: accuracies are close to, not equal to, those on the original", path)
        side = self.resize or 32
        key = (fingerprint(path), side)
        arrays = jpeg_arrays(cached(str(self.data_dir), self.name, key, lambda: decode_jpeg_npz(path, side)))
        return self._known(side).check(arrays, str(path))


class CIFAR100(CIFAR10):
    """CIFAR-100 with its 100 fine labels."""

    name = "cifar100"
    archive = "cifar-100-binary.tar.gz"
    folder = "cifar-100-binary"
    md5 = "03b5dce01913d631647c71ecec9e9cb8"
    members = {"train": ["train.bin"], "test": ["test.bin"]}
    names_file = "fine_label_names.txt"
    python_archive = "cifar-100-python.tar.gz"
    python_folder = "cifar-100-python"
    python_members = {"train": ["train"], "test": ["test"]}
    python_names = "meta", "fine_label_names"
    python_labels = "fine_labels"
    label_bytes = 2  # coarse, then fine
    num_classes = 100
    names = """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
        lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
        pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
        television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
    own = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def read_members(source: Path, folders: list[str], names: list[str]) -> dict[str, bytes]:
    """Return the bytes of the named files that exist in a .tar.gz (below one of ``folders``) or in a folder."""
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in names if (source / name).is_file()}
    with tarfile.open(source, "r:gz") as archive:
        contents = {}
        for member in archive:  # in one pass: looking members up by name would inflate the archive again
            name = member.name.removeprefix("./")
            for folder in folders:
                name = name.removeprefix(f"{folder}/")
            if name in names and (file := archive.extractfile(member)) is not None:
                contents[name] = file.read()
    return contents


def is_jpeg_layout(path: Path) -> bool:
    """Whether an npz holds JPEG streams; looks at the names only."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return "jpeg" in getattr(file, "files", ())
    except DAMAGE:
        return False  # the reader of the whole file says what is wrong with it


def decode_jpeg_npz(path: Path, side: int) -> dict[str, np.ndarray]:
    """images [n, 3, side, side] uint8, labels [n], split [n], classes of a JPEG file (10 s for 60,000)."""
    from PIL import Image

    file = read_npz(path)
    missing = {"jpeg", "offset", "label", "is_test", "classes"} - set(file)
    require(not missing, f"{path} lacks {', '.join(sorted(missing))}")
    data, offset, n = file["jpeg"], file["offset"], len(file["label"])
    require(
        len(offset) == n + 1 and len(file["is_test"]) == n and int(offset[-1]) == len(data),
        f"{path}: offset, label, is_test and jpeg do not fit together",
    )
    log.info("decoding the %s images of %s once", f"{n:,}", path)

    def one(i: int) -> np.ndarray:
        try:
            with Image.open(io.BytesIO(data[offset[i] : offset[i + 1]].tobytes()), formats=["JPEG"]) as image:
                if image.size != (32, 32):
                    raise ValueError(f"its size is {image.size}")
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except DAMAGE as error:
            raise ConfigError(f"{path}: image {i} cannot be decoded ({error})") from error

    images = resize(fill(map(one, range(n)), n, (3, 32, 32)), side)
    split = np.where(file["is_test"], TEST, TRAIN).astype(np.int8)
    return {
        "images": images,
        "labels": file["label"].astype(np.int64),
        "split": split,
        "classes": file["classes"],
    }


def jpeg_arrays(file: dict[str, np.ndarray]) -> Arrays:
    """Arrays from what decode_jpeg_npz returns, train images first (the papers' pooling order)."""
    order = np.argsort(file["split"], kind="stable")
    images, names = file["images"][order], [str(c) for c in file["classes"]]
    labels, split, scale = file["labels"][order], file["split"][order], half(images)
    return Arrays(images, labels, split, len(names), class_names=names, mean=scale, std=scale)
