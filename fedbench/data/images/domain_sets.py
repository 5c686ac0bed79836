"""Office-Caltech10 and DomainNet-10: pictures of ten kinds of objects in four and six domains, the natural clients.

Sources: Gong et al., CVPR 2012 (Office-Caltech10); Peng et al., ICCV 2019 (DomainNet).  Li et al., FedBN, ICLR 2021,
published the files that pFedMoAP and FedOTP use.
Licences: none is stated for Office-Caltech10; DomainNet is for non-commercial research.
Layout, FedBN's or folders::

    {domain}_train.pkl, {domain}_test.pkl     pickled lists of (paths, class names), read without running anything
    {domain}/{class}/{picture}

In folders, a stratified fifth of each domain is the test part, which gives the sizes of FedBN's lists.  Folders of
other names are ignored.

``label_pairing: official_bug`` repeats two mistakes in the code of pFedMoAP and FedOTP that explain their printed
tables (zero-shot CLIP at chance).  A client has the labels of its own samples, but images from the top of its domain's
list, which all clients of the domain share.  Class names are in another order than labels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

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
TEST_FRACTION = 0.2  # of each domain, without FedBN's lists
Row = tuple[str, int, int, int]  # path, label, domain, part


@dataclass
class DomainSet:
    """Pictures of ten classes in several domains (cameras or styles), each of which is a natural client.

    Args:
        data_dir: Folder of the cache and of the data set.
        path: The folder of the data set.  None: data_dir/office_caltech_10 or data_dir/DomainNet.
        seed: Seed of the test part without FedBN's lists, and of the wrong order of class names.
        resize: Side in pixels of the centre square of each picture.
        label_pairing: correct, or official_bug (see the module).
    """

    data_dir: str
    path: str | None = None
    seed: Seed = 0
    resize: Count = 224
    label_pairing: Literal["correct", "official_bug"] = "correct"

    folder = ""
    domains: ClassVar[tuple[str, ...]] = ()
    classes: ClassVar[tuple[str, ...]] = ()  # in the order of their labels

    def __post_init__(self) -> None:
        self.root = Path(self.data_dir) / self.folder if self.path is None else Path(self.path)

    def load(self) -> Arrays:
        """Return the centre squares of all pictures, decoded or from the cache.

        The option label_pairing=official_bug repeats two mistakes of the papers' code: class names are in another order
        than labels, and a client's images are not those of its labels.

        Raises:
            ConfigError: Pictures or lists are absent, or have another layout.
        """
        lists = {(d, part): self.root / f"{d}_{part}.pkl" for d in self.domains for part in PARTS}
        has_lists = any(path.is_file() for path in lists.values())
        # (file, class index, domain index, part) of each picture
        rows = self._rows_of_lists(lists) if has_lists else self._rows_of_folders()
        files = [row[0] for row in rows]
        labels, domain = (np.array([row[i] for row in rows], np.int64) for i in (1, 2))
        split = np.array([row[3] for row in rows], np.int8)
        order = np.arange(len(files))  # all pictures, in the order in which official_bug takes them
        self._check_classes(labels, domain)
        root = self.root
        if not has_lists:
            split, order = split_domains(labels, domain, self.seed)
        elif (root.parent / files[0]).is_file():  # FedBN's paths start with the name of the folder
            root = root.parent
        names = [name.replace("_", " ") for name in self.classes]
        arrays = Arrays(
            inputs=centre_squares(self.data_dir, self.folder, root, files, self.resize),
            targets=labels,
            split=split,
            num_classes=len(names),
            class_names=names,
            domain=domain,
            domain_names=list(self.domains),
            mean=CLIP_MEAN,
            std=CLIP_STD,
        )
        if self.label_pairing == "official_bug":
            log.warning(
                "dataset.label_pairing=official_bug: images, labels and class names do not match, as in the released "
                "code; set dataset.label_pairing=correct to have them match"
            )
            wrong = np.random.default_rng(self.seed).permutation(len(names))  # the order of the names
            arrays.class_names = [names[i] for i in wrong]
            arrays.fit = images_from_top(domain, split, order)
        return arrays.check()

    def _rows_of_lists(self, lists: dict[tuple[str, str], Path]) -> list[Row]:
        """Return a tuple (file, class index, domain index, part code) for each picture in FedBN's lists.

        Args:
            lists: The list files by domain and part, such as ("amazon", "train").

        Raises:
            ConfigError: A list does not exist, or names another class.
        """
        missing = [path.name for path in lists.values() if not path.is_file()]
        require(not missing, f"{self.root} has some of FedBN's lists, but not {', '.join(missing)}: copy them there")
        rows = []
        for (domain, part), path in lists.items():
            for file, name in zip(*read_list(path)):
                require(
                    name in self.classes,
                    f"{path} has the class {name}, which is not one of {', '.join(self.classes)}: use FedBN's list",
                )
                rows.append((file, self.classes.index(name), self.domains.index(domain), PARTS[part]))
        return rows

    def _rows_of_folders(self) -> list[Row]:
        """Return a tuple (file, class index, domain index, TRAIN) for each picture in the folders domain/class/picture.

        Raises:
            ConfigError: A folder does not exist.
        """
        rows = []
        for d, y in np.ndindex(len(self.domains), len(self.classes)):
            name = f"{self.domains[d]}/{self.classes[y]}"
            folder = self.root / name
            if not folder.is_dir():
                finding = f"has neither FedBN's lists ({self.domains[0]}_train.pkl ...) nor the folder {name}"
                raise ConfigError(
                    f"{self.root} {finding if self.root.is_dir() else 'does not exist'}: put the package of github.com/"
                    f"med-air/FedBN there, or folders domain/class of {', '.join(self.domains)}, or set dataset.path"
                )
            pictures = [
                file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not is_hidden(file.name)
            ]
            rows += [(f"{name}/{file.name}", y, d, TRAIN) for file in sorted(pictures)]
        return rows

    def _check_classes(self, labels: np.ndarray, domain: np.ndarray) -> None:
        """Raise ConfigError if one of the classes has no pictures in one of the domains.

        Args:
            labels: Class of each picture, [n].
            domain: Domain of each picture, [n].
        """
        counts = np.zeros((len(self.domains), len(self.classes)), np.int64)
        np.add.at(counts, (domain, labels), 1)  # pictures of each domain and class
        for d, y in np.argwhere(counts == 0)[:1]:  # the first pair, if there is one
            raise ConfigError(
                f"{self.root} has no pictures of the class {self.classes[y]} in {self.domains[d]}: add pictures of it, "
                "or replace the folder by the published one"
            )


class OfficeCaltech10(DomainSet):
    """2,533 pictures: 958, 1,123, 157 and 295 of the four domains."""

    folder = "office_caltech_10"
    domains = ("amazon", "caltech", "dslr", "webcam")
    classes = (
        *("back_pack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop_computer", "monitor", "mouse", "mug", "projector"),
    )


class DomainNet10(DomainSet):
    """22,851 pictures of the ten most frequent classes."""

    folder = "DomainNet"
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    classes = (
        *("bird", "feather", "headphones", "ice_cream", "teapot"),
        *("tiger", "whale", "windmill", "wine_glass", "zebra"),
    )


def split_domains(labels: np.ndarray, domain: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each domain into training and test parts: ceil(n / 5) test samples, stratified by class.

    Args:
        labels: Classes [n].
        domain: Domains [n].
        seed: Seed of the split.

    Returns:
        The part of each sample [n] int8, and all samples in the random order of the split [n].
    """
    from sklearn.model_selection import train_test_split  # slow to import

    split = np.full(len(labels), TRAIN, np.int8)
    order = []
    for d in range(int(domain.max()) + 1):
        samples = np.flatnonzero(domain == d)
        try:
            train, test = train_test_split(
                samples, test_size=TEST_FRACTION, random_state=seed, stratify=labels[samples]
            )
        except ValueError as error:
            raise ConfigError(
                f"the pictures of domain {d} cannot be split into train and test by class ({error}): add pictures to "
                "each class of this domain"
            ) from error
        split[test] = TEST
        order += [train, test]
    return split, np.concatenate(order)


def images_from_top(
    domain: np.ndarray, split: np.ndarray, order: np.ndarray
) -> "Callable[[Arrays, Split, bool], Arrays]":
    """Return a function that pairs images and labels as pFedMoAP and FedOTP do by mistake (label_pairing=official_bug).

    Of a client's samples of one domain and part, the k-th keeps its label, but has the k-th image in the list of this
    domain and part.  The function is called as `Arrays.fit`, as soon as the samples of each client are known.

    Args:
        domain: Domains [n].
        split: Parts, as codes from 0 to 3 such as TRAIN and TEST [n].
        order: All samples [n].  Those of one domain and part, in this order, are its list.
    """
    list_of = domain * 4 + split  # [n], the list of each sample: a number for its domain and part, of at most 4 parts
    lists = {number: order[list_of[order] == number] for number in np.unique(list_of).tolist()}

    def fit(arrays: Arrays, clients: "Split", normalize: bool) -> Arrays:
        """Return the arrays, in which a client's samples of a domain and part have the first images of their list.

        This is the papers' mistake: their labels belong to other images, and clients share images.
        `list_of` has the number of each sample's list, which is that of its domain and part (train, val or test).
        `lists` is a dict from this number to the samples in the list.

        Args:
            arrays: The arrays.
            clients: The samples of each client.
            normalize: Not used: `Arrays.fit` passes it for tables.
        """
        image_of = np.arange(len(list_of))  # the image of each sample
        for part in (clients.train, clients.val, clients.test):
            for client in range(len(part)):
                samples = part[client]
                for number in np.unique(list_of[samples]).tolist():
                    members = samples[list_of[samples] == number]  # the client's samples of one domain and part
                    image_of[members] = lists[number][: len(members)]
        return replace(arrays, shared={"inputs": image_of})  # sample i has row image_of[i] of the inputs

    return fit


def read_list(path: Path) -> tuple[list[str], list[str]]:
    """Return the paths and class names of one of FedBN's lists.

    Args:
        path: The pickle.

    Raises:
        ConfigError: The file is damaged, or contains something else.
    """
    try:
        paths, names = read_plain(path.read_bytes())
        files, classes = [str(p) for p in paths], [str(n) for n in names]
    except NotPlainError as error:
        raise ConfigError(
            f"{path} is not a pickled pair of paths and class names: it contains {error}; use FedBN's list"
        ) from None
    except Exception as error:  # a damaged pickle may raise any exception
        raise ConfigError(
            f"{path} is not a pickled pair of paths and class names ({error}): use FedBN's list"
        ) from error
    fits = len(files) == len(classes) > 0
    require(
        fits,
        f"{path} lists {len(files):,} pictures and {len(classes):,} class names, expected equally many and at least "
        "one: use FedBN's list",
    )
    return files, classes
