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

Pictures and labels are torchvision's, its own train, validation and test parts pooled.  CoOp's author drew one split,
published as split_zhou_<set>.json: it is used where that file lies beside the pictures' folder, or where split_file
says.  Otherwise its rule is followed with `seed`, which gives the same sizes, not the same pictures: of each class's
files, sorted and then shuffled, round(0.5 n) train, round(0.2 n) val, the rest test (halves to even).

With dataset.split=published the val part is the clients' validation part: the papers do not use it, and nothing is
ever trained on it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.error_text import is_raised_here
from fedbench.core.options import ConfigError, Count, NonNegativeInt, require
from fedbench.data._files import log
from fedbench.data._images import CLIP_MEAN, CLIP_STD, centre_squares
from fedbench.data.base import PARTS, TEST, TRAIN, VAL, Arrays
from fedbench.data.images._private_torchvision import paths_and_labels


@dataclass
class Listing:
    """The pictures of a set: files below root [n], labels [n] int64, part [n] int8, class names [C]."""

    root: Path
    files: list[str]
    labels: np.ndarray
    part: np.ndarray
    names: list[str]


class PictureSet:
    """data_dir: where torchvision's folder is, or is downloaded to; CoOp's own folders are read as well.

    split_file: CoOp's json; null: looked for beside the pictures, else the split is drawn from `seed`.
    resize: side in pixels of the centre square that is kept of each picture.
    """

    name = ""
    kind = ""  # torchvision's class
    parts: tuple[str, ...] = ("train", "val", "test")  # torchvision's
    folders: tuple[str, str] = ("", "")  # of the pictures, below data_dir: torchvision's, CoOp's
    split_name = ""  # CoOp's file
    template = "a photo of a {}."  # CoOp's, for its zero-shot classifier

    def __init__(self, data_dir: str, split_file: str | None = None, seed: NonNegativeInt = 0, resize: Count = 224):
        self.data_dir, self.split_file, self.seed, self.resize = Path(data_dir), split_file, seed, resize

    def load(self) -> Arrays:
        """List the pictures (download them, if need be) and decode them; ConfigError says what is wrong where."""
        coop = self._published()
        listing = self._redrawn() if coop is None else read_split(coop, self._folder())
        self._check(listing)
        sizes = ", ".join(f"{int((listing.part == code).sum()):,} {part}" for part, code in PARTS.items())
        origin = coop or f"drawn with dataset.seed={self.seed}, for want of {self.split_name}"
        log.info("%s: %s (the split: %s)", self.name, sizes, origin)
        return Arrays(
            inputs=centre_squares(str(self.data_dir), self.name, listing.root, listing.files, self.resize),
            targets=listing.labels,
            split=listing.part,
            num_classes=len(listing.names),
            class_names=[name.replace("_", " ") for name in listing.names],
            mean=CLIP_MEAN,
            std=CLIP_STD,
            template=self.template,
        ).check()

    # -- what differs between the sets ---------------------------------------------------------------------
    def open_part(self, kind: Any, part: str) -> Any:
        """One of torchvision's parts, downloaded where it is not there yet."""
        return kind(str(self.data_dir), split=part, download=True)

    def pictures(self, data: Any) -> tuple[Sequence[Path], Sequence[int]]:
        """Paths and labels of the pictures of a part."""
        return paths_and_labels(self.kind, data)

    def class_names(self, data: Any) -> list[str]:
        """Of all classes, in the order of their labels."""
        return list(data.classes)

    def assign(self, labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """The part of each picture [n] int8, from labels [n] and torchvision's names of parts [n]."""
        return resplit(labels, self.seed)

    # -- where things are ----------------------------------------------------------------------------------
    def _published(self) -> Path | None:
        """CoOp's split file, if the user has it."""
        if self.split_file is not None:
            path = Path(self.split_file)
            require(path.is_file(), f"dataset.split_file={path} is not there: CoOp calls it {self.split_name}")
            return path
        beside = [(self.data_dir / folder).parent / self.split_name for folder in self.folders]
        return next((path for path in beside if path.is_file()), None)

    def _folder(self) -> Path:
        """The folder of the pictures; downloads them where there is none."""
        known = [self.data_dir / folder for folder in self.folders]
        return next((folder for folder in known if folder.is_dir()), None) or self._redrawn().root

    def _redrawn(self) -> Listing:
        """torchvision's parts, pooled, sorted by file and split anew."""
        root, rows, named = self.data_dir / self.folders[0], [], {}
        kind = self._torchvision()
        for part in self.parts:
            data = self._reading(lambda part=part: self.open_part(kind, part))
            named[part] = self.class_names(data)
            paths, labels = self.pictures(data)
            rows += [(path.relative_to(root).as_posix(), int(y), part) for path, y in zip(paths, labels)]
        names = named[self.parts[0]]
        odd = next((part for part in self.parts if named[part] != names), None)
        require(odd is None, f"{root.parent}: the parts {self.parts[0]} and {odd} do not have the same classes")
        files, labels, parts = ([row[i] for row in sorted(rows)] for i in range(3))
        targets = np.array(labels, np.int64)
        return Listing(root, files, targets, self.assign(targets, np.array(parts)), names)

    def _torchvision(self) -> Any:
        try:
            from torchvision import datasets
        except ImportError as error:
            raise ConfigError(f"dataset={self.name} needs torchvision: pip install torchvision") from error
        return getattr(datasets, self.kind)

    def _reading(self, read: Callable[[], Any]) -> Any:
        """read(), or one sentence about what torchvision stumbled over."""
        folder = self.data_dir / self.folders[0]
        there = folder.is_dir()  # before a download
        try:
            return read()
        except Exception as error:  # of torchvision, scipy, tarfile, urllib: they have no common base
            if is_raised_here(error):
                raise
            said = (str(error).splitlines() or [type(error).__name__])[0]
            advice = (
                f"{folder.parent} is not laid out as torchvision's {self.kind} leaves it ({said}): move it away to "
                f"have it downloaded again, or put {self.split_name} into it"
                if there
                else f"{self.name} is not in {folder} and could not be downloaded ({said}): where there is a network "
                f'run torchvision.datasets.{self.kind}("{self.data_dir}", download=True), or set data_dir'
            )
            raise ConfigError(advice) from error

    def _check(self, listing: Listing) -> None:
        """Every picture is listed once, and every class has some to train and to be tested on."""
        twice = [file for file, count in Counter(listing.files).items() if count > 1]
        require(not twice, f"{self.name}: the split lists {(twice or [''])[0]} twice")
        for part in ("train", "test"):
            held = set(listing.labels[listing.part == PARTS[part]].tolist())
            none = [name for c, name in enumerate(listing.names) if c not in held]
            require(
                not none,
                f"{len(none)} of the {len(listing.names)} classes of {self.name} have no {part} pictures in "
                f"{listing.root} (the first is {(none or [''])[0]})",
            )


class Flowers102(PictureSet):
    """8,189 pictures of 102 flowers, named by cat_to_name.json where that file lies beside the pictures' folder."""

    name, kind, split_name = "flowers102", "Flowers102", "split_zhou_OxfordFlowers.json"
    folders = ("flowers-102/jpg", "oxford_flowers/jpg")
    template = "a photo of a {}, a type of flower."

    def class_names(self, data: Any) -> list[str]:
        """torchvision's, one of which ends in a question mark, or the file's, numbered from 1."""
        path = (self.data_dir / self.folders[0]).parent / "cat_to_name.json"
        if not path.is_file():
            return [name.rstrip("?") for name in data.classes]
        told = read_json(path)
        wanted = [str(number) for number in range(1, len(data.classes) + 1)]
        fits = isinstance(told, dict) and all(isinstance(told.get(number), str) for number in wanted)
        require(fits, f"{path} does not name the classes 1 to {len(wanted)}")
        return [told[number] for number in wanted]


class OxfordPets(PictureSet):
    """7,349 pictures of 37 breeds: the published test part; the published trainval part split 80/20."""

    name, kind, split_name = "oxford_pets", "OxfordIIITPet", "split_zhou_OxfordPets.json"
    parts = ("trainval", "test")
    folders = ("oxford-iiit-pet/images", "oxford_pets/images")
    template = "a photo of a {}, a type of pet."

    def class_names(self, data: Any) -> list[str]:
        """The prefixes of the file names in lower case, which torchvision capitalizes."""
        return [name.lower() for name in data.classes]

    def assign(self, labels: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Of each class's trainval pictures round(0.2 n) are val."""
        part = np.where(parts == "test", TEST, TRAIN).astype(np.int8)  # [n]
        for members in shuffled_classes(np.where(part == TRAIN, labels, -1), self.seed):
            part[members[: round(0.2 * len(members))]] = VAL
        return part


class Food101(PictureSet):
    """101,000 pictures of 101 dishes."""

    name, kind, split_name = "food101", "Food101", "split_zhou_Food101.json"
    parts = ("train", "test")
    folders = ("food-101/images", "food-101/images")
    template = "a photo of {}, a type of food."


class Caltech101(PictureSet):
    """8,242 pictures of 100 kinds of objects: without the background, and without the second folder of faces."""

    name, kind, split_name = "caltech101", "Caltech101", "split_zhou_Caltech101.json"
    parts = ("all",)
    folders = ("caltech101/101_ObjectCategories", "caltech-101/101_ObjectCategories")
    dropped = ("BACKGROUND_Google", "Faces_easy")
    renamed = {"airplanes": "airplane", "Faces": "face", "Leopards": "leopard", "Motorbikes": "motorbike"}

    def open_part(self, kind: Any, part: str) -> Any:
        """All of it: torchvision knows no parts."""
        return kind(str(self.data_dir), download=True)

    def pictures(self, data: Any) -> tuple[Sequence[Path], Sequence[int]]:
        """Those of the kinds that are left, a picture once."""
        label = {name: y for y, name in enumerate(self._kept(data))}
        rows = [(data.categories[y], number) for y, number in zip(data.y, data.index)]
        root = self.data_dir / self.folders[0]
        paths = {root / name / f"image_{number:04d}.jpg": label[name] for name, number in rows if name in label}
        return list(paths), list(paths.values())

    def class_names(self, data: Any) -> list[str]:
        """torchvision's, four of them renamed as CoOp does."""
        return [self.renamed.get(name, name) for name in self._kept(data)]

    def _kept(self, data: Any) -> list[str]:
        return [name for name in data.categories if name not in self.dropped]


class DTD(PictureSet):
    """5,640 pictures of 47 textures."""

    name, kind, split_name = "dtd", "DTD", "split_zhou_DescribableTextures.json"
    folders = ("dtd/dtd/images", "dtd/images")
    template = "{} texture."


def shuffled_classes(labels: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """For each class, the samples of labels [n] that are of it, shuffled; those below 0 are of none."""
    for c in range(int(labels.max()) + 1):
        yield np.random.default_rng([seed, c]).permutation(np.flatnonzero(labels == c))


def resplit(labels: np.ndarray, seed: int) -> np.ndarray:
    """CoOp's rule: the part [n] int8 of samples with labels [n], 50/20/30 per class."""
    part = np.full(len(labels), TEST, np.int8)
    for members in shuffled_classes(labels, seed):
        train, val = round(0.5 * len(members)), round(0.2 * len(members))
        part[members[:train]], part[members[train : train + val]] = TRAIN, VAL
    return part


def read_json(path: Path) -> Any:
    """What a json file holds; ConfigError where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as json ({error})") from error


def read_split(path: Path, root: Path) -> Listing:
    """CoOp's split: lists train, val and test of [picture below root, label, class name]; sorted by picture."""
    told = read_json(path)
    try:
        rows = sorted((str(f), int(y), PARTS[p], str(name)) for p in PARTS for f, y, name in told[p])
        names = dict(sorted({(y, name) for _, y, _, name in rows}))
        labels = np.array([y for _, y, _, _ in rows], np.int64)
        fits = list(names) == list(range(len(names))) and all(names[y] == name for _, y, _, name in rows)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not one of CoOp's splits: three lists train, val and test of [picture, label, class name] "
            f"({type(error).__name__}: {error})"
        ) from error
    require(fits and bool(rows), f"{path}: its labels do not name the classes 0, 1, 2 ... one by one")
    part = np.array([part for _, _, part, _ in rows], np.int8)
    return Listing(root, [file for file, _, _, _ in rows], labels, part, list(names.values()))
