"""Five sets of pictures on which prompts for CLIP are compared, split as by CoOp (Zhou et al., IJCV 2022).

Sources: Caltech-101 (Fei-Fei et al., 2004), Describable Textures (Cimpoi et al., 2014), Flowers-102 (Nilsback and
Zisserman, 2008), Food-101 (Bossard et al., 2014), Oxford-IIIT Pets (Parkhi et al., 2012).
Licences: Caltech-101 CC BY 4.0, Pets CC BY-SA 4.0; textures for research; none is stated for flowers and food.
Layout, as torchvision's downloads or CoOp's folders::

    data_dir/
        caltech101/101_ObjectCategories/     or caltech-101/101_ObjectCategories/
        dtd/dtd/images/                      or dtd/images/
        flowers-102/jpg/                     or oxford_flowers/jpg/
        food-101/images/
        oxford-iiit-pet/images/              or oxford_pets/images/

Pictures and labels are torchvision's, with its train, validation and test parts pooled.  CoOp published its split as
split_zhou_<set>.json.  It is used if that file is next to the folder of the pictures, or if split_file names it.
Else CoOp's rule is applied with `seed`, which gives the same sizes but other pictures.  The files of each class are
sorted and shuffled: round(0.5 n) train, round(0.2 n) val, the rest test (halves to even).

With dataset.split=published the val part is the clients' validation part.  The papers do not use it, and it is never
trained on.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError, Count, NonNegativeInt, require
from fedbench.data._files import log
from fedbench.data._images import CLIP_MEAN, CLIP_STD, centre_squares
from fedbench.data.base import PARTS, TEST, TRAIN, VAL, Arrays
from fedbench.data.images._private_torchvision import paths_and_labels


@dataclass
class Listing:
    """The n pictures of a set: root folder, files, labels, parts (split), and class names.

    Attributes:
        root: The folder of the pictures.
        files: Their paths in it [n].
        labels: Their classes [n] int64.
        split: Their parts [n] int8.
        names: The class names [C].
    """

    root: Path
    files: list[str]
    labels: np.ndarray
    split: np.ndarray
    names: list[str]


@dataclass
class PictureSet:
    """A set of pictures in torchvision's or CoOp's folders (CoOp: Zhou et al., IJCV 2022, whose split files are read).

    A subclass sets the attributes from ``name`` to ``template``, and overrides methods where the set differs.

    Args:
        data_dir: Folder of the data set, and of the download.
        split_file: CoOp's json file.  None: the one next to the pictures, else a split is made with `seed`.
        seed: Seed of the split.
        resize: Side in pixels of the centre square of each picture.
    """

    data_dir: str
    split_file: str | None = None
    seed: NonNegativeInt = 0
    resize: Count = 224

    name = ""
    kind = ""  # torchvision's class
    parts: ClassVar[Sequence[str]] = ("train", "val", "test")  # of torchvision's class
    folders: ClassVar[tuple[str, str]] = ("", "")  # of the pictures, below data_dir: torchvision's, CoOp's
    split_name = ""  # the name of CoOp's split file
    template = "a photo of a {}."  # CoOp's sentence for its zero-shot classifier; {} is the class name

    def load(self) -> Arrays:
        """Return the centre squares of all pictures, which are downloaded if they do not exist.

        Raises:
            ConfigError: The pictures or the split file are absent, or do not fit each other.
        """
        split_file = self._find_split_file()
        # the pictures: folder root, files in it, labels, split and class names
        listing = self._split_by_rule() if split_file is None else read_split(split_file, self._folder())
        self._check(listing)
        sizes = ", ".join(f"{int((listing.split == code).sum()):,} {part}" for part, code in PARTS.items())
        origin = split_file or f"made with dataset.seed={self.seed}, because {self.split_name} is absent"
        log.info("%s: %s (the split: %s)", self.name, sizes, origin)
        return Arrays(
            inputs=centre_squares(self.data_dir, self.name, listing.root, listing.files, self.resize),
            targets=listing.labels,
            split=listing.split,
            num_classes=len(listing.names),
            class_names=[name.replace("_", " ") for name in listing.names],
            mean=CLIP_MEAN,  # of the pixels, as CLIP's own preprocessing
            std=CLIP_STD,
            template=self.template,  # a sentence in which {} is the class name
        ).check()

    # -- what differs between the sets ---------------------------------------------------------------------
    def open_part(self, kind: Any, part: str) -> Any:
        """Return one of torchvision's parts, downloaded if it is absent.

        Args:
            kind: torchvision's class.
            part: The name of the part.
        """
        return kind(self.data_dir, split=part, download=True)

    def pictures(self, data: Any) -> tuple[Sequence[Path], Sequence[int]]:
        """Return the pictures of one of torchvision's parts.

        Args:
            data: The part, an object of torchvision's class.

        Returns:
            The path of each picture, and its class index.
        """
        return paths_and_labels(self.kind, data)

    def class_names(self, data: Any) -> list[str]:
        """Return the class names in the order of their indices.

        Args:
            data: One part of the set, such as its training part, as an object of torchvision's class.
        """
        return list(data.classes)

    def assign(self, labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Return the part of each picture by CoOp's rule, 50/20/30 in each class: TRAIN, VAL or TEST.  # [n] int8

        Args:
            labels: Classes [n].
            parts: The names of torchvision's parts [n].  Not used here; subclasses that keep these parts read it.
        """
        return split_by_class(labels, self.seed)

    # -- files -----------------------------------------------------------------------------------------------
    @property
    def _root(self) -> Path:
        """The folder where torchvision stores the pictures of this set below data_dir; it need not exist."""
        return Path(self.data_dir) / self.folders[0]

    def _find_split_file(self) -> Path | None:
        """Return the path of CoOp's split file: dataset.split_file, or else the file next to the pictures' folder.

        Returns:
            The path.  None: the option is null, and there is no such file next to the pictures.

        Raises:
            ConfigError: The file that the option names does not exist.
        """
        if self.split_file is not None:
            path = Path(self.split_file)
            require(
                path.is_file(), f"dataset.split_file={path} does not exist: set it to CoOp's {self.split_name}, or null"
            )
            return path
        # folders: of the pictures, as torchvision and as CoOp name them
        paths = [(Path(self.data_dir) / folder).parent / self.split_name for folder in self.folders]
        return next((path for path in paths if path.is_file()), None)

    def _folder(self) -> Path:
        """Return the folder of the pictures: where torchvision stores them, or else where CoOp does.

        If neither folder exists, torchvision downloads the pictures.
        """
        folders = [Path(self.data_dir) / folder for folder in self.folders]
        return next((folder for folder in folders if folder.is_dir()), None) or self._split_by_rule().root

    def _split_by_rule(self) -> Listing:
        """Return the pictures of all of torchvision's parts together, sorted by file and split by CoOp's rule.

        Raises:
            ConfigError: torchvision is not installed, or the pictures can be neither read nor downloaded.
        """
        try:
            from torchvision import datasets
        except ImportError as error:
            raise ConfigError(f"dataset={self.name} needs torchvision: run pip install torchvision") from error
        kind = getattr(datasets, self.kind)  # torchvision's class
        rows: list[tuple[str, int, str]] = []  # path below the folder, class index, name of torchvision's part
        names_of: dict[str, list[str]] = {}
        for part in self.parts:
            data = self._load(lambda part=part: self.open_part(kind, part))  # an object of the class
            names_of[part] = self.class_names(data)
            paths, labels = self.pictures(data)
            rows += [(path.relative_to(self._root).as_posix(), int(y), part) for path, y in zip(paths, labels)]
        names = names_of[self.parts[0]]
        for part in self.parts:
            require(
                names_of[part] == names,
                f"{self._root.parent}: the parts {self.parts[0]} and {part} have different classes: delete the folder "
                "to download it again",
            )
        rows.sort()
        labels = np.array([label for _, label, _ in rows], np.int64)
        split = self.assign(labels, np.array([part for _, _, part in rows]))
        return Listing(self._root, [file for file, _, _ in rows], labels, split, names)

    def _load(self, read: Callable[[], Any]) -> Any:
        """Return read(), and turn the errors of torchvision into a ConfigError.

        Args:
            read: Function that lets torchvision read a part of the data set, or download it.
        """
        exists = self._root.is_dir()  # before a download
        try:
            return read()
        except Exception as error:  # of torchvision, scipy, tarfile, urllib: they have no common base
            if is_raised_here(error):  # by a line of fedbench, not of a library
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if exists:
                raise ConfigError(
                    f"{self._root.parent} does not have the layout of torchvision's {self.kind} ({reason}): move it "
                    f"away, so that fedbench downloads the data again, or, if it has only the images, put CoOp's file "
                    f"{self.split_name} into it, which lists images and labels"
                ) from error
            raise ConfigError(
                f"{self.name} is not in {self._root} and could not be downloaded ({reason}): run torchvision.datasets."
                f'{self.kind}("{self.data_dir}", download=True) on a machine with a network, or set data_dir'
            ) from error

    def _check(self, listing: Listing) -> None:
        """Raise ConfigError if a picture is listed twice, or if a class lacks training pictures or test pictures."""
        twice = [file for file, count in Counter(listing.files).items() if count > 1]
        if twice:
            raise ConfigError(
                f"{self._find_split_file() or self.name} lists the picture {twice[0]} twice: remove one of the entries"
            )
        for part in ("train", "test"):
            counts = np.bincount(listing.labels[listing.split == PARTS[part]], minlength=len(listing.names))
            absent = [listing.names[c] for c in np.flatnonzero(counts == 0)]
            if absent:
                raise ConfigError(
                    f"{len(absent)} of the {len(listing.names)} classes of {self.name} have no {part} pictures in "
                    f"{listing.root} (the first is {absent[0]}): add pictures there, or correct the split file"
                )


class Flowers102(PictureSet):
    """8,189 pictures of 102 flowers, named by cat_to_name.json if that file is next to the folder of the pictures."""

    name, kind, split_name = "flowers102", "Flowers102", "split_zhou_OxfordFlowers.json"
    folders = ("flowers-102/jpg", "oxford_flowers/jpg")
    template = "a photo of a {}, a type of flower."

    def class_names(self, data: Any) -> list[str]:
        """Return the class names by class index: those in cat_to_name.json, where classes are numbered from 1.

        Without that file, they are torchvision's names without the question mark at the end of some.

        Args:
            data: One of torchvision's parts, an object of its class.

        Raises:
            ConfigError: The file is damaged, or does not name all classes.
        """
        path = self._root.parent / "cat_to_name.json"
        if not path.is_file():
            return [name.rstrip("?") for name in data.classes]
        names = read_json(path)
        keys = [str(number) for number in range(1, len(data.classes) + 1)]
        fits = isinstance(names, dict) and all(isinstance(names.get(key), str) for key in keys)
        require(fits, f"{path} does not name each of the classes 1 to {len(keys)}: add the names, or remove the file")
        return [names[key] for key in keys]


class OxfordPets(PictureSet):
    """7,349 pictures of 37 breeds: the published test part; the published trainval part is split 80/20."""

    name, kind, split_name = "oxford_pets", "OxfordIIITPet", "split_zhou_OxfordPets.json"
    parts = ("trainval", "test")
    folders = ("oxford-iiit-pet/images", "oxford_pets/images")
    template = "a photo of a {}, a type of pet."

    def class_names(self, data: Any) -> list[str]:
        """Return the names of the breeds in the order of their indices, in lower case as in CoOp."""
        return [name.lower() for name in data.classes]

    def assign(self, labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Return the part of each picture: the published test part, and VAL for a fifth of each class's other pictures.

        Args:
            labels: Classes [n].
            parts: The names of torchvision's parts [n], "trainval" or "test".
        """
        split = np.where(parts == "test", TEST, TRAIN).astype(np.int8)  # [n]
        # Samples with the label -1, here the test part, are skipped.
        for members in shuffled_classes(np.where(split == TRAIN, labels, -1), self.seed):
            split[members[: round(0.2 * len(members))]] = VAL
        return split


class Food101(PictureSet):
    """101,000 pictures of 101 dishes."""

    name, kind, split_name = "food101", "Food101", "split_zhou_Food101.json"
    parts = ("train", "test")
    folders = ("food-101/images", "food-101/images")
    template = "a photo of {}, a type of food."


class Caltech101(PictureSet):
    """8,242 pictures of 100 kinds of objects, without the background and the second folder of faces."""

    name, kind, split_name = "caltech101", "Caltech101", "split_zhou_Caltech101.json"
    parts = ("all",)
    folders = ("caltech101/101_ObjectCategories", "caltech-101/101_ObjectCategories")
    excluded = ("BACKGROUND_Google", "Faces_easy")
    renamed = {"airplanes": "airplane", "Faces": "face", "Leopards": "leopard", "Motorbikes": "motorbike"}

    def open_part(self, kind: Any, part: str) -> Any:
        """Return the whole data set, an object of torchvision's class `kind`.  It has no parts: `part` is not used."""
        return kind(self.data_dir, download=True)

    def pictures(self, data: Any) -> tuple[Sequence[Path], Sequence[int]]:
        """Return the path and the class index of each picture, without those of the excluded classes.

        Args:
            data: torchvision's data set, which may list a picture twice.
        """
        class_index = {name: y for y, name in enumerate(self._used(data))}  # from the names of the used classes
        rows = [(data.categories[y], number) for y, number in zip(data.y, data.index)]  # class name, picture number
        labels = {
            self._root / name / f"image_{number:04d}.jpg": class_index[name]
            for name, number in rows
            if name in class_index
        }
        return list(labels), list(labels.values())

    def class_names(self, data: Any) -> list[str]:
        """Return the names of the used classes of torchvision's object `data`, in its order.

        Four of them, in ``renamed``, get CoOp's names."""
        return [self.renamed.get(name, name) for name in self._used(data)]

    def _used(self, data: Any) -> list[str]:
        """Return the names of the classes that CoOp uses, in torchvision's order: those not in ``self.excluded``.

        Args:
            data: The data set as an object of torchvision's class.
        """
        return [name for name in data.categories if name not in self.excluded]


class DTD(PictureSet):
    """5,640 pictures of 47 textures."""

    name, kind, split_name = "dtd", "DTD", "split_zhou_DescribableTextures.json"
    folders = ("dtd/dtd/images", "dtd/images")
    template = "{} texture."


def shuffled_classes(labels: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yield the indices of the samples of each class, shuffled.

    Args:
        labels: Classes [n]; samples with negative labels are skipped.
        seed: Seed of the shuffling.
    """
    for c in range(int(labels.max()) + 1):
        yield np.random.default_rng([seed, c]).permutation(np.flatnonzero(labels == c))


def split_by_class(labels: np.ndarray, seed: int) -> np.ndarray:
    """Split samples by CoOp's rule, 50/20/30 in each class.

    Args:
        labels: Classes [n].
        seed: Seed of the shuffling.

    Returns:
        The part of each sample [n] int8.
    """
    split = np.full(len(labels), TEST, np.int8)
    for members in shuffled_classes(labels, seed):
        train, val = round(0.5 * len(members)), round(0.2 * len(members))
        split[members[:train]] = TRAIN
        split[members[train : train + val]] = VAL
    return split


def read_json(path: Path) -> Any:
    """Return the content of a JSON file as Python objects; raise ConfigError if it is damaged or cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): replace it by the published file") from error


def read_split(path: Path, root: Path) -> Listing:
    """Return the pictures in CoOp's split file: lists train, val and test of [picture below root, label, class name].

    Args:
        path: The file.
        root: The folder of the pictures.

    Returns:
        The pictures, sorted by file.

    Raises:
        ConfigError: The file has another format, or its labels are not 0, 1, 2 ...
    """
    content = read_json(path)
    try:
        # rows of picture, label, part and class name
        rows = sorted((str(f), int(y), PARTS[p], str(name)) for p in PARTS for f, y, name in content[p])
        pairs = sorted({(y, name) for _, y, _, name in rows})
        names = dict(pairs)
        labels = np.array([y for _, y, _, _ in rows], np.int64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not one of CoOp's splits: expected three lists train, val and test of [picture, label, class "
            f"name] ({type(error).__name__}: {error}); replace or remove it"
        ) from error
    require(
        bool(rows) and [label for label, _ in pairs] == list(range(len(pairs))),
        f"{path}: each label 0, 1, 2 ... must have exactly one class name, but the labels and names of its entries are "
        f"{', '.join(f'{label} {name!r}' for label, name in pairs[:12]) or 'missing'}: correct them",
    )
    split = np.array([part for _, _, part, _ in rows], np.int8)
    return Listing(root, [file for file, _, _, _ in rows], labels, split, list(names.values()))
