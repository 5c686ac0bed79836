"""Properties of published data sets, to detect other files under their names."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedbench.core.options import require
from fedbench.data.base import PARTS, Arrays

log = logging.getLogger("fedbench.data")


@dataclass(frozen=True)
class Published:
    """A published set of images.

    Attributes:
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

    def check(self, arrays: Arrays, source: str) -> Arrays:
        """Return the checked arrays, with all classes of the set, even those without a sample.

        A warning tells how many images of the set a subset holds.

        Raises:
            ConfigError: The set cannot have these images, classes or numbers of images.
        """
        self._check_images(arrays, source)
        self._check_classes(arrays, source)
        arrays.num_classes = len(self.classes)
        arrays.class_names = arrays.class_names or list(self.classes)
        arrays.check()
        self._check_counts(arrays, source)
        return arrays

    def _refuse_unless(self, condition: bool, source: str, what: str) -> None:
        require(condition, f"{source} is not {self.name}: {what}; dataset=npz reads an npz of your own")

    def _check_images(self, arrays: Arrays, source: str) -> None:
        (images,) = arrays.parts().values()
        wanted = [(self.channels, side, side) for side in self.sides]
        self._refuse_unless(
            images.dtype == np.uint8 and images.shape[1:] in wanted,
            source,
            f"its inputs are {images.dtype} {images.shape[1:]}, expected uint8 {' or '.join(map(str, wanted))}",
        )

    def _check_classes(self, arrays: Arrays, source: str) -> None:
        names, count = arrays.class_names, len(self.classes)
        self._refuse_unless(
            arrays.num_classes <= count,
            source,
            f"it holds {arrays.num_classes} classes, more than the {count} of the set",
        )
        self._refuse_unless(
            len(names or self.classes) == count, source, f"it names {len(names or ())} of {count} classes"
        )
        odd = sorted(set(names or ()) - set(self.classes))
        self._refuse_unless(
            2 * len(odd) <= count, source, f"it names the class {(odd or [''])[0]}, expected {', '.join(self.classes)}"
        )
        if odd:
            log.warning("%s: %s of %s has other names: %s", source, len(odd), self.name, ", ".join(odd))
        if arrays.task != "classification":
            return
        found = np.unique(arrays.targets)
        self._refuse_unless(
            2 * len(found) >= count,
            source,
            f"only {len(found)} of its {count} classes occur ({', '.join(map(str, found))})",
        )
        if len(found) < count:
            log.warning("%s: only %s of the %s classes of %s occur", source, len(found), count, self.name)

    def _check_counts(self, arrays: Arrays, source: str) -> None:
        """Check the numbers of images; a file without parts may hold all images of the set."""
        held = {part: int((arrays.split == code).sum()) for part, code in PARTS.items()}
        counts = {part: self.counts.get(part, 0) for part in PARTS}
        if held["train"] == len(arrays) > counts["train"]:
            held, counts = {"": len(arrays)}, {"": sum(counts.values())}
        for part, n in held.items():
            what = f"it holds {n:,} {part} images".replace("  ", " ")
            self._refuse_unless(n <= counts[part], source, f"{what}, and the set has {counts[part]:,}")
        few = [f"{n:,} of {counts[part]:,} {part} images" for part, n in held.items() if n < counts[part]]
        if few:
            log.warning("%s is a part of %s: %s", source, self.name, ", ".join(few).replace("  ", " "))
