"""Published image data sets: their properties, by which other files are recognized, and their common options."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbench.core.options import Count, require
from fedbench.data._files import read_npz
from fedbench.data.arrays.npz import from_layout, resized
from fedbench.data.base import PARTS, Arrays

log = logging.getLogger("fedbench.data")


@dataclass
class DownloadedImages:
    """Options of a data set that is downloaded if it is not found.

    Args:
        data_dir: Folder of the data set, and of the download.
        path: The files to read instead.  None: those in data_dir (see the module), else a download.
        resize: Side in pixels of the resized images.  None: images are not resized.
        mirror: Address of a folder to download from.  None: the published address.
        verify: Whether to refuse a file whose md5 is not the published one.
    """

    data_dir: str
    path: str | None = None
    resize: Count | None = None
    mirror: str | None = None
    verify: bool = True


@dataclass(frozen=True)
class Published:
    """Properties of a published set of images: channels, sides (in pixels), names of classes, and counts by part.

    Attributes:
        name: Its name, for messages.
        channels: Channels of its images.
        sides: Sides of its square images, in pixels.
        classes: Names of the classes.
        counts: Number of images of each part.
    """

    name: str
    channels: int
    sides: Sequence[int]
    classes: Sequence[str]
    counts: Mapping[str, int]

    def read(self, path: Path, options: DownloadedImages, task: str = "classification") -> Arrays:
        """Return the checked data set in an npz, with resized images if ``options.resize`` is set.

        Args:
            path: The file.
            options: The options of the data set.
            task: The kind of targets, "classification" or "multilabel".
        """
        arrays = self.check(from_layout(read_npz(path), str(path), task), str(path))
        return resized(arrays, options.resize, options.data_dir, path)

    def check(self, arrays: Arrays, source: str) -> Arrays:
        """Return the arrays after a check that they can be this set, with all of its classes and their names.

        A warning reports a file that has only a part of the images.

        Args:
            arrays: The arrays, which are changed.
            source: The file, for messages.

        Raises:
            ConfigError: The set cannot have these images, classes or numbers of images.
        """
        (images,) = arrays.parts().values()  # the only input
        shapes = [(self.channels, side, side) for side in self.sides]  # the set is published in several sizes
        self._require(
            images.dtype == np.uint8 and images.shape[1:] in shapes,
            f"its inputs are {images.dtype} {images.shape[1:]}, expected uint8 {' or '.join(map(str, shapes))}",
            source,
        )
        self._check_classes(arrays, source)
        arrays.num_classes = len(self.classes)
        arrays.class_names = arrays.class_names or list(self.classes)
        arrays.check()
        self._check_counts(arrays, source)
        return arrays

    def _require(self, condition: bool, reason: str, source: str) -> None:
        """Refuse a file that is not this published set.

        Args:
            condition: Whether a property of the file fits this set.
            reason: What does not fit, for the message.
            source: The file, for the message.

        Raises:
            ConfigError: The condition is False.
        """
        require(
            condition,
            f"{source} is not {self.name}: {reason}; set dataset.path to the published file, or use "
            "dataset=npz to read an npz of your own",
        )

    def _check_classes(self, arrays: Arrays, source: str) -> None:
        """Check the classes of a file: their number, their names, and how many of them have images.

        At least half of the names must be published ones, and at least half of the classes must have images (unless
        the labels are multi-label).  Smaller differences are logged as warnings.

        Args:
            arrays: The data set in the file.
            source: The file, for messages.

        Raises:
            ConfigError: The classes are not those of this set.
        """
        names, count = arrays.class_names, len(self.classes)  # names in the file, or None
        self._require(
            arrays.num_classes <= count, f"it has {arrays.num_classes} classes, and the set has {count}", source
        )
        self._require(len(names or self.classes) == count, f"it names {len(names or ())} of {count} classes", source)
        unknown = sorted(set(names or ()) - set(self.classes))
        if unknown:
            self._require(
                2 * len(unknown) <= count,
                f"it names the class {unknown[0]}, expected {', '.join(self.classes)}",
                source,
            )
            log.warning(
                "%s: %s classes have names that %s does not have, so check that it is the right data set: %s",
                source,
                len(unknown),
                self.name,
                ", ".join(unknown),
            )
        if arrays.task == "classification":
            labels = np.unique(arrays.targets)
            shown = ", ".join(map(str, labels))
            self._require(
                2 * len(labels) >= count, f"only {len(labels)} of its {count} classes occur ({shown})", source
            )
            if len(labels) < count:
                log.warning("%s: only %s of the %s classes of %s occur", source, len(labels), count, self.name)

    def _check_counts(self, arrays: Arrays, source: str) -> None:
        """Check that no part (train, val, test) has more images than published; warn if one has fewer.

        A file without a split counts as one part of all images.

        Args:
            arrays: The data set in the file.
            source: The file, for messages.

        Raises:
            ConfigError: A part has too many images.
        """
        # Numbers of images by their description in messages, such as "train images".
        actual = {f"{part} images": int((arrays.split == code).sum()) for part, code in PARTS.items()}
        published = {f"{part} images": self.counts.get(part, 0) for part in PARTS}
        if actual["train images"] == len(arrays) > published["train images"]:  # a file without a split
            actual, published = {"images": len(arrays)}, {"images": sum(published.values())}
        for part, n in actual.items():
            self._require(n <= published[part], f"it has {n:,} {part}, and the set has {published[part]:,}", source)
        subset = [f"{n:,} of {published[part]:,} {part}" for part, n in actual.items() if n < published[part]]
        if subset:
            log.warning("%s is a part of %s: %s", source, self.name, ", ".join(subset))
