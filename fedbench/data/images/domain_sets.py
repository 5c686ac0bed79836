"""Office-Caltech10 and DomainNet-10: pictures of ten kinds of objects in four and six styles, each a natural silo.

Sources: Gong et al., CVPR 2012 (Office-Caltech10); Peng et al., ICCV 2019 (DomainNet); both as packed by Li et al.,
FedBN, ICLR 2021, from where pFedMoAP and FedOTP take them.
Licences: none is stated for Office-Caltech10; DomainNet is for research that is not commercial.
Layout, FedBN's or plain folders::

    {domain}_train.pkl, {domain}_test.pkl     pickled lists of (paths, class names), read without running anything
    {domain}/{class}/{picture}

Of plain folders a fifth of every domain, stratified, is the test part (scikit-learn's cut, which gives the sizes of
FedBN's lists).  Folders of other names are left aside.

``label_pairing: official_bug`` repeats two mistakes in the code of pFedMoAP and FedOTP that explain their printed
tables (zero-shot CLIP at chance): a client has the labels of its own samples, but as many images from the top of its
domain's list, which the domain's clients therefore share; and class names are in another order than labels.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedbench.core.options import ConfigError, Count, Seed, require
from fedbench.data._files import is_hidden, log
from fedbench.data._images import CLIP_MEAN, CLIP_STD, centre_squares
from fedbench.data._pickled import NotPlainError, read_plain
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.images.image_folder import SUFFIXES

if TYPE_CHECKING:
    from fedbench.core.split import Split

PARTS = {"train": TRAIN, "test": TEST}
TEST_SHARE = 0.2  # of every domain, where no list says


class DomainSet:
    """path: the folder; null: data_dir/<its usual name>.  resize: side of the centre square kept of each picture.

    seed: draws the test part where no list says, and the wrong order of class names.
    label_pairing: correct, or official_bug as above.
    """

    folder = ""
    domains: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # in the order of their labels

    def __init__(
        self,
        data_dir: str,
        path: str | None = None,
        seed: Seed = 0,
        resize: Count = 224,
        label_pairing: Literal["correct", "official_bug"] = "correct",
    ):
        self.data_dir, self.seed, self.resize = data_dir, seed, resize
        self.root = Path(data_dir) / self.folder if path is None else Path(path)
        self.label_pairing: Literal["correct", "official_bug"] = label_pairing

    def load(self) -> Arrays:
        """List and decode the pictures; ConfigError with one sentence where they are missing or laid out otherwise."""
        root, files, labels, domain, part = self._listed()
        order = np.arange(len(files))
        if part is None:
            part, order = cut_domains(labels, domain, self.seed)
        self._check_classes(labels, domain)
        names = [name.replace("_", " ") for name in self.classes]
        arrays = Arrays(
            inputs=centre_squares(self.data_dir, self.folder, root, files, self.resize),
            targets=labels,
            split=part,
            num_classes=len(names),
            class_names=names,
            domain=domain,
            domain_names=list(self.domains),
            mean=CLIP_MEAN,
            std=CLIP_STD,
        )
        if self.label_pairing == "official_bug":
            log.warning("dataset.label_pairing=official_bug: images, labels and class names do not belong together")
            wrong = np.random.default_rng(self.seed).permutation(len(names))
            arrays.class_names = [names[i] for i in wrong]
            arrays.fit = top_of_list(domain, part, order)
        return arrays.check()

    def _listed(self) -> tuple[Path, list[str], np.ndarray, np.ndarray, np.ndarray | None]:
        """Where paths start, pictures [n], labels [n], domains [n], and parts [n] if lists say."""
        lists = {(d, p): self.root / f"{d}_{p}.pkl" for d in self.domains for p in PARTS}
        if not any(path.is_file() for path in lists.values()):
            files, labels, domain = self._in_folders()
            return self.root, files, np.array(labels, np.int64), np.array(domain, np.int64), None
        missing = [path.name for path in lists.values() if not path.is_file()]
        require(not missing, f"{self.root} holds some of FedBN's lists, but not {', '.join(missing)}")
        rows = []
        for (d, p), path in lists.items():
            rows += [(f, self._label(name, path), self.domains.index(d), PARTS[p]) for f, name in zip(*read_list(path))]
        files, labels, domain, part = ([row[i] for row in rows] for i in range(4))
        above = self.root.parent  # FedBN's paths begin with the folder's own name
        base = above if (above / files[0]).is_file() else self.root
        return base, files, np.array(labels, np.int64), np.array(domain, np.int64), np.array(part, np.int8)

    def _in_folders(self) -> tuple[list[str], list[int], list[int]]:
        """Pictures of domain/class/picture, their labels and domains."""
        rows = []
        for d, y in np.ndindex(len(self.domains), len(self.classes)):
            folder = f"{self.domains[d]}/{self.classes[y]}"
            if not (self.root / folder).is_dir():
                lacks = f"holds neither FedBN's lists ({self.domains[0]}_train.pkl ...) nor the folder {folder}"
                raise ConfigError(
                    f"{self.root} {lacks if self.root.is_dir() else 'is not there'}: put the package of github.com/"
                    f"med-air/FedBN there, or folders domain/class of {', '.join(self.domains)}, or set dataset.path"
                )
            found = (p.name for p in (self.root / folder).iterdir() if p.suffix.lower() in SUFFIXES)
            names = sorted(name for name in found if not is_hidden(name))
            rows += [(f"{folder}/{name}", y, d) for name in names]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]

    def _label(self, name: str, path: Path) -> int:
        known = name in self.classes
        require(known, f"{path} names the class {name}, which is not among {', '.join(self.classes)}")
        return self.classes.index(name)

    def _check_classes(self, labels: np.ndarray, domain: np.ndarray) -> None:
        """Every class has pictures in every domain."""
        counts = np.zeros((len(self.domains), len(self.classes)), np.int64)
        np.add.at(counts, (domain, labels), 1)
        for d, y in np.argwhere(counts == 0)[:1]:
            raise ConfigError(f"{self.root} has no pictures of the class {self.classes[y]} in {self.domains[d]}")


class OfficeCaltech10(DomainSet):
    """2,533 pictures: 958, 1,123, 157 and 295 of the four domains."""

    folder = "office_caltech_10"
    domains = ("amazon", "caltech", "dslr", "webcam")
    classes = (
        *("back_pack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    )


class DomainNet10(DomainSet):
    """22,851 pictures, of the ten classes that have most."""

    folder = "DomainNet"
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    classes = (
        *("bird", "feather", "headphones", "ice_cream", "teapot"),
        *("tiger", "whale", "windmill", "wine_glass", "zebra"),
    )


def cut_domains(labels: np.ndarray, domain: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The part [n] int8 of samples with labels and domains [n], and all samples in the order of drawing [n].

    ceil(n / 5) samples of every domain are its test part, classes in proportion.
    """
    from sklearn.model_selection import train_test_split  # slow to import

    part, order = np.full(len(labels), TRAIN, np.int8), []
    for d in range(int(domain.max()) + 1):
        samples = np.flatnonzero(domain == d)
        try:
            train, test = train_test_split(samples, test_size=TEST_SHARE, random_state=seed, stratify=labels[samples])
        except ValueError as error:
            raise ConfigError(f"natural silo {d} cannot be cut into train and test, by class: {error}") from error
        part[test] = TEST
        order += [train, test]
    return part, np.concatenate(order)


def top_of_list(domain: np.ndarray, part: np.ndarray, order: np.ndarray) -> "Callable[[Arrays, Split, bool], Arrays]":
    """Arrays.fit of the papers' mistake: the k-th sample of a client shows the k-th image of its domain's list.

    domain, part [n] tell which list a sample is in, order [n] the lists themselves, one after the other.
    """
    group = domain * 4 + part  # [n]
    lists = {g: order[group[order] == g] for g in np.unique(group).tolist()}

    def fit(arrays: Arrays, split: "Split", normalize: bool) -> Arrays:
        shown = np.arange(len(group))
        for clients in (split.train, split.val, split.test):
            for samples in (clients[i] for i in range(len(clients))):
                for g in np.unique(group[samples]).tolist():
                    listed = samples[group[samples] == g]
                    shown[listed] = lists[g][: len(listed)]
        return replace(arrays, shared={"inputs": shown})

    return fit


def read_list(path: Path) -> tuple[list[str], list[str]]:
    """The paths and class names of one of FedBN's lists; ConfigError where it is none."""
    try:
        paths, names = read_plain(path.read_bytes())
        files, classes = [str(p) for p in paths], [str(n) for n in names]
    except NotPlainError as error:
        raise ConfigError(f"{path} is not a pickled pair of paths and class names: it names {error}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise ConfigError(f"{path} is not a pickled pair of paths and class names ({error})") from error
    fits = len(files) == len(classes) > 0
    require(fits, f"{path} lists {len(files):,} pictures and {len(classes):,} class names")
    return files, classes
