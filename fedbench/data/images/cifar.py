"""CIFAR-10 and CIFAR-100: 50,000 train and 10,000 test images, 32x32 colour, as published.

Source: Krizhevsky, Learning multiple layers of features from tiny images, 2009 (cs.toronto.edu/~kriz/cifar.html).
Licence: none is stated; used for research.
Layout; without ``path``, the first that exists is read, else the binary version is downloaded::

    data_dir/
        cifar10.npz, cifar100.npz                         the converted download
        cifar-10-binary.tar.gz, cifar-10-batches-bin/     the binary version
        cifar-10-python.tar.gz, cifar-10-batches-py/      the Python version, as torchvision stores it
        cifar10_jpeg.npz

CIFAR-100 has the same archives under its name.  The pickles of the Python version are read without running them.

A JPEG file has the arrays ``jpeg`` (concatenated JPEG streams), ``offset``, ``label``, ``is_test`` and ``classes``.
JPEG is lossy: accuracies are close to, but not equal to, those on the original, and the images have another order.
"""

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from fedbench.core.options import ConfigError, require
from fedbench.data._files import DAMAGE, cached, download, fingerprint, log, read_npz, store
from fedbench.data._images import fill, half_per_channel, resize
from fedbench.data._pickled import NotPlainError, read_plain
from fedbench.data.arrays.npz import from_layout, resized
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.images._published import DownloadedImages, Published

PIXELS = 3 * 32 * 32
JPEG_ARRAYS = {"jpeg", "offset", "label", "is_test", "classes"}


@dataclass
class CIFAR10(DownloadedImages):
    """CIFAR-10.  `path` is an npz (MedMNIST layout or JPEG), an archive or its extracted folder.

    Args:
        statistics: Statistics of the pixels for normalization: half (mean and standard deviation 0.5) or own (those of
            the train images).
    """

    statistics: Literal["half", "own"] = "half"

    name = "cifar10"
    archive = "cifar-10-binary.tar.gz"
    folder = "cifar-10-batches-bin"
    md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    members = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
    names_file = "batches.meta.txt"
    label_bytes = 1  # before the pixels of each image; the label is the last of them
    python_archive = "cifar-10-python.tar.gz"
    python_folder = "cifar-10-batches-py"
    python_members = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    python_names_file, python_names_key = "batches.meta", "label_names"
    python_labels_key = "labels"
    classes = "airplane automobile bird cat deer dog frog horse ship truck"
    # the usual mean and standard deviation of the training images
    train_statistics = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

    def load(self) -> Arrays:
        """Return the images in the files, which are downloaded and converted if they do not exist.

        With the option statistics=own, they are normalized by the mean and standard deviation of the training images;
        otherwise, by 0.5 and 0.5.

        Raises:
            ConfigError: The files do not exist and cannot be downloaded, or are other files.
        """
        source = self._find() if self.path is None else Path(self.path)
        require(
            source.exists(),
            f"{source} does not exist: set dataset.path to an npz, {self.archive}, {self.python_archive}, or "
            f"the folder {self.folder} or {self.python_folder}, or to null to download the data set",
        )
        if source.suffix == ".npz":
            arrays = self._from_npz(source)
        else:
            named_arrays = self._convert(source)
            arrays = self._published().check(from_layout(named_arrays, str(source), "classification"), str(source))
            if self.path is None:  # store the converted arrays, so that the next start finds them
                store(Path(self.data_dir) / f"{self.name}.npz", named_arrays)
            arrays = resized(arrays, self.resize, self.data_dir, source)
        # mean and standard deviation of each color, for model=clip_prompt with norm=official, which scales as papers do
        arrays.published_scaling = self.train_statistics
        if self.statistics == "own":
            arrays.mean, arrays.std = self.train_statistics
        return arrays

    def _published(self, side: int = 32) -> Published:
        """Return the facts that a file of the published set must have: class names, and numbers and shape of images.

        Args:
            side: Height and width of the images in pixels.
        """
        counts = {"train": 50_000, "test": 10_000}
        return Published(self.name, channels=3, sides=[side], classes=self.classes.split(), counts=counts)

    def _find(self) -> Path:
        """Return the path of the set in data_dir; if it is not there, download the archive.

        Of several files and folders, an npz comes first, then archives with their folders, and an npz of JPEG last.
        """
        stored = self.archive, self.folder, self.python_archive, self.python_folder
        for name in (f"{self.name}.npz", *stored, f"{self.name}_jpeg.npz"):  # JPEG last, as it is not exact
            if (path := Path(self.data_dir) / name).exists():
                return path
        address = (self.mirror or "https://www.cs.toronto.edu/~kriz").rstrip("/")
        path = Path(self.data_dir) / self.archive
        return download([f"{address}/{self.archive}"], path, self.md5 if self.verify else None, self.name)

    def _convert(self, source: Path) -> dict[str, np.ndarray]:
        """Return the arrays of an archive or its extracted folder in the MedMNIST layout.

        Args:
            source: The archive or folder, of the binary or the Python version.

        Returns:
            train_images and test_images [n, 3, 32, 32] uint8, train_labels and test_labels [n], and classes [C].
        """
        names = [self.names_file, self.python_names_file]  # with the names of the classes
        # members: from part ("train", "test") to the names of its files
        names += [name for members in (self.members, self.python_members) for part in members.values() for name in part]
        try:
            contents = read_members(source, [self.folder, self.python_folder], names)
            is_python = self.python_names_file in contents
            return self._from_python(contents) if is_python else self._from_binary(contents)
        except Exception as error:  # a damaged pickle may raise any exception
            is_refused = isinstance(error, NotPlainError)  # its text is what the pickle asks for
            reason = (
                f"its pickle asks for {error}, which may run code" if is_refused else f"{type(error).__name__}: {error}"
            )
            raise ConfigError(
                f"{source} is damaged or not {self.name} as published ({reason}): delete it to download it again, or "
                "replace it by the published one"
            ) from error

    def _from_binary(self, contents: dict[str, bytes]) -> dict[str, np.ndarray]:
        """Convert the files of the binary version (contents: their bytes by file name) to named arrays.

        Each file consists of records: the label bytes of an image, then its pixels.  The last label byte is the class.

        Returns:
            train_images and test_images [n, 3, 32, 32] uint8, train_labels and test_labels [n], and classes [C].
        """
        file = {"classes": np.array(contents[self.names_file].decode().split())}  # names_file: names of the classes
        for part, names in self.members.items():  # "train" and "test", and the names of their files
            data = np.frombuffer(b"".join(contents[name] for name in names), np.uint8)
            records = data.reshape(-1, self.label_bytes + PIXELS)  # [n, labels and pixels]
            file[f"{part}_images"] = records[:, self.label_bytes :].reshape(-1, 3, 32, 32)
            file[f"{part}_labels"] = records[:, self.label_bytes - 1]
        return file

    def _from_python(self, contents: dict[str, bytes]) -> dict[str, np.ndarray]:
        """Convert the files of the Python version (contents: their bytes by file name) to named arrays.

        Each file is a pickled dict of images [n, 3 * 32 * 32] uint8 and a list of labels.

        Returns:
            train_images and test_images [n, 3, 32, 32] uint8, train_labels and test_labels [n], and classes [C].
        """
        classes = read_plain(contents[self.python_names_file])[self.python_names_key]
        file = {"classes": np.array([str(name) for name in classes])}
        for part, names in self.python_members.items():  # "train" and "test", and the names of their files
            batches = [read_plain(contents[name]) for name in names]
            images = np.concatenate([batch["data"] for batch in batches])
            if images.dtype != np.uint8:
                raise ValueError(
                    f"the {part} images have dtype {images.dtype}, but uint8 is published; use the published file"
                )
            file[f"{part}_images"] = images.reshape(-1, 3, 32, 32)
            labels = [label for batch in batches for label in batch[self.python_labels_key]]
            file[f"{part}_labels"] = np.array(labels, np.int64)
        return file

    def _from_npz(self, path: Path) -> Arrays:
        """Return the checked data set in an npz file, with images resized to ``resize`` pixels if that is set.

        Args:
            path: The file, with arrays as in MedMNIST (train_images, ...) or an array "jpeg" of concatenated JPEG
                streams.

        Raises:
            ConfigError: The file is damaged, or is not this set.
        """
        if not is_jpeg_layout(path):
            return self._published().read(path, options=self)
        log.info("%s has JPEG images: accuracies are close to, not equal to, those on the original", path)
        side = self.resize or 32
        file = cached(self.data_dir, self.name, (fingerprint(path), side), lambda: decode_jpeg_npz(path, side))
        order = np.argsort(file["split"], kind="stable")  # train images first, as in the papers
        images, names = file["images"][order], [str(c) for c in file["classes"]]
        scale = half_per_channel(images)
        arrays = Arrays(
            inputs=images,
            targets=file["labels"][order],
            split=file["split"][order],
            num_classes=len(names),
            class_names=names,
            mean=scale,
            std=scale,
        )
        return self._published(side).check(arrays, str(path))  # the published set with images of side x side pixels


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
    python_names_file, python_names_key = "meta", "fine_label_names"
    python_labels_key = "fine_labels"
    label_bytes = 2  # coarse, then fine
    classes = """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
        lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
        pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
        television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
    train_statistics = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def read_members(source: Path, folders: Sequence[str], names: Sequence[str]) -> dict[str, bytes]:
    """Return the contents of files in a folder or an archive, by their names.  Files that do not exist are left out.

    Args:
        source: The folder that contains the files, or a .tar.gz.
        folders: Folders of the archive that may contain the files.
        names: The names of the files.
    """
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in names if (source / name).is_file()}
    contents = {}
    with tarfile.open(source, "r:gz") as archive:
        for member in archive:  # in one pass: looking members up by name would decompress the archive again
            name = member.name.removeprefix("./")
            for folder in folders:
                name = name.removeprefix(f"{folder}/")
            if name in names and (file := archive.extractfile(member)) is not None:
                contents[name] = file.read()
    return contents


def is_jpeg_layout(path: Path) -> bool:
    """Return whether an npz file stores images as JPEG bytes, in an array called "jpeg"; False if it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return "jpeg" in getattr(file, "files", ())
    except DAMAGE:
        return False  # read_npz reports what is wrong


def decode_jpeg_npz(path: Path, side: int) -> dict[str, np.ndarray]:
    """Decode the images of an npz file with JPEG streams.

    Args:
        path: The npz.
        side: Height and width of the result, in pixels.

    Returns:
        By name: images [n, 3, side, side] uint8, labels [n] int64, split [n] int8 and classes [C].

    Raises:
        ConfigError: An array is absent, has another length, or an image is damaged.
    """
    file = read_npz(path)
    missing = JPEG_ARRAYS - set(file)
    require(
        not missing,
        f"{path} lacks the arrays {', '.join(sorted(missing))}, which JPEG images need: add these arrays to it",
    )
    data, offset, n = file["jpeg"], file["offset"], len(file["label"])
    require(
        len(offset) == n + 1 and len(file["is_test"]) == n and int(offset[-1]) == len(data),
        f"{path}: for {n:,} labels, is_test must have {n:,} entries and offset {n + 1:,}, the last of which is the "
        f"length of jpeg; they have {len(file['is_test']):,} and {len(offset):,}: write the file again",
    )
    log.info("decoding the %s images of %s once", f"{n:,}", path)

    def decode_one(i: int) -> np.ndarray:
        """Return image number i of the file, [3, 32, 32] uint8; raise ConfigError if it is damaged.

        Its JPEG stream is data[offset[i] : offset[i + 1]], where data joins the streams of all images.
        """
        try:
            with Image.open(io.BytesIO(data[offset[i] : offset[i + 1]].tobytes()), formats=["JPEG"]) as image:
                if image.size != (32, 32):
                    raise ValueError(
                        f"it has {image.size[0]} x {image.size[1]} pixels, but must have 32 x 32; resize it"
                    )
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except DAMAGE as error:
            raise ConfigError(
                f"{path}: image {i} cannot be decoded ({error}): write the file again with another JPEG image"
            ) from error

    return {
        "images": resize(fill(map(decode_one, range(n)), n, (3, 32, 32)), side),
        "labels": file["label"].astype(np.int64),
        "split": np.where(file["is_test"], TEST, TRAIN).astype(np.int8),
        "classes": file["classes"],
    }
